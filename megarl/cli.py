"""The command line: which commands there are (one file each in megarl/commands), and how an error leaves."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

import typer
from rich.console import Console

from megarl.commands import convert, doctor, evaluate, plan, profile, recipe, submit, supervised, train
from megarl.core.errors import MegarlError

app = typer.Typer(
    help="Reinforcement-learning post-training of large language models on Megatron-core, SGLang and Ray.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(train.train)
app.command()(supervised.sft)
app.command()(supervised.rm)
app.command()(supervised.dpo)
app.command(name="eval")(evaluate.evaluate)
app.command()(plan.plan)
app.command()(profile.profile)
app.command()(doctor.doctor)
app.add_typer(recipe.app, name="recipe")
app.add_typer(convert.app, name="convert")
app.add_typer(submit.app)  # submit, status, logs, cancel


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM ends a run as Ctrl-C does: everything is torn down in order, which a second one must not interrupt."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
