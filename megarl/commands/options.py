"""Arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipePath = Annotated[
    Path, typer.Argument(help="YAML recipe; `megarl recipe list` names examples.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Values that override the recipe's, as key.path=value: run.seed=2 train.steps=10.", show_default=False
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the last committed checkpoint of this run's folder.")
]
GoOn = Annotated[
    bool,
    typer.Option(
        "--continue",
        help="As --resume where there is a checkpoint; else begin, in place of an earlier start that committed none.",
    ),
]
DiscardJournal = Annotated[
    bool,
    typer.Option(
        "--discard-journal",
        help="With --resume or --continue: forget all recorded samples, and sample what comes after the checkpoint anew.",
    ),
]

Timeout = Annotated[float, typer.Option(min=1, help="Seconds for all of it.")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]
