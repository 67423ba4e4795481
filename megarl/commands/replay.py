"""`megarl replay`: steps of a run trained on again, without servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megarl.commands.options import Overrides


def replay(
    run: Annotated[Path, typer.Argument(help="Folder of a run of `megarl train`.", show_default=False)],
    overrides: Overrides = None,
    from_step: Annotated[int | None, typer.Option(min=1, help="First step; default: the first that is there.")] = None,
    to_step: Annotated[int | None, typer.Option(min=1, help="Last step; default: the last that is there.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write into; default: RUN/replay-1, -2 and so on.")] = None,
) -> None:
    """Train on the samples of a run again, from its journal and without any server.

    Begins with the checkpoint before the first step, or with the base model. With the run's own recipe every loss is the
    same to the bit, and the end says so; with other keys it shows what another loss, learning rate or layout would have
    learned from the same samples. A run with train.journal_keep=all has those of every step; any other removes the samples
    that no kept checkpoint needs.

    Example, after a run with train.journal_keep=all: megarl replay runs/quickstart --from-step 11 --to-step 14
    """
    from megarl.run.replay import run_replay

    run_replay(run, overrides or [], from_step, to_step, out)
