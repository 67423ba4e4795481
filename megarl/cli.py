"""The command line: megarl train | sft | eval | recipe show | doctor. Heavy imports wait until a command needs them."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from megarl.core.errors import MegarlError

app = typer.Typer(
    help="Reinforcement-learning post-training of large language models on Megatron-core, SGLang and Ray.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
recipe_app = typer.Typer(help="Look at recipes.", no_args_is_help=True)
app.add_typer(recipe_app, name="recipe")

RecipePath = Annotated[Path, typer.Argument(help="YAML recipe; recipes/ holds examples.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Values that override the recipe's, as key.path=value: run.seed=2 train.steps=10.", show_default=False
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the last committed checkpoint of this run's folder.")
]


@app.command()
def train(recipe: RecipePath, overrides: Overrides = None, resume: Resume = False) -> None:
    """Train a policy by reinforcement learning.

    Checks the whole recipe first (keys, batch sizes, model folder, data rows, reward function) and refuses it with one
    paragraph and exit code 2. Then starts the servers and ranks, trains, and leaves in the run's folder: metrics.jsonl,
    curve.png, logs/, samples/, checkpoints/ and hf/, which transformers loads.

    Example: megarl train recipes/quickstart.yaml run.seed=2 train.steps=20
    """
    from megarl.commands import run_train

    run_train(recipe, overrides or [], resume)


@app.command()
def sft(recipe: RecipePath, overrides: Overrides = None, resume: Resume = False) -> None:
    """Train a model on demonstrations, on the same Megatron engine.

    Rows hold chats (`messages`) or a prompt and a response; only the assistant's tokens are trained on.

    Example: megarl sft recipes/quickstart_sft.yaml
    """
    from megarl.commands import run_sft

    run_sft(recipe, overrides or [], resume)


@app.command(name="eval")
def evaluate(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Answer the held-out prompts with the server pool, grade the answers and print the table.

    Takes the same recipe as `megarl train`; another model is named by model.path=FOLDER.

    Example: megarl eval recipes/quickstart.yaml model.path=runs/quickstart/hf
    """
    from megarl.commands import run_eval

    run_eval(recipe, overrides or [])


@app.command()
def doctor() -> None:
    """Say what this machine has, against the pinned versions, and what each missing part costs.

    Exits non-zero only where megarl cannot run.
    """
    from megarl.doctor import diagnose, render

    diagnosis = diagnose()
    Console().print(render(diagnosis))
    raise typer.Exit(0 if diagnosis.can_run else 1)


@recipe_app.command()
def show(
    recipe: RecipePath,
    overrides: Overrides = None,
    kind: Annotated[str, typer.Option(help="train or sft; default: by the recipe's keys.")] = "",
) -> None:
    """Print the resolved recipe: base, overrides and defaults put together, and its batch arithmetic."""
    from megarl.commands import show_recipe

    show_recipe(recipe, overrides or [], kind)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM ends a run as Ctrl-C does: everything is torn down in order."""
    raise KeyboardInterrupt


def main() -> None:
    """Entry point: one paragraph for a user's mistake (exit code 2), no stack trace for an expected error (exit code 1)."""
    signal.signal(signal.SIGTERM, _terminate)
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        app(standalone_mode=True)
    except MegarlError as error:
        errors.print(f"megarl: {error}", markup=False)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        errors.print("megarl: interrupted; everything of this run has been ended", markup=False)
        sys.exit(130)
