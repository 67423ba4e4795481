"""The command line: which commands there are (one file each in megarl/commands), and how an error leaves."""

from __future__ import annotations

import errno
import gc
import io
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from megarl.commands import (
    convert,
    doctor,
    evaluate,
    plan,
    profile,
    quickstart,
    recipe,
    replay,
    report,
    serve,
    submit,
    supervised,
    train,
)
from megarl.core.end_signals import SIGNALS
from megarl.core.errors import MegarlError, UserError
from megarl.core.exit_codes import FAULT
from megarl.core.interrupts import Interrupts, as_error
from megarl.core.log import visible
from megarl.core.terminal import forget_no_width, outlive_terminal
from megarl.core.versions import installed

ENGINES = ("torch", "megatron-core", "sglang", "ray", "transformers")  # distributions
BY_SIGNALS = tuple(128 + number for number in SIGNALS)  # exit codes


class Commands(TyperGroup):
    """All commands. Typer itself ends with 130 at a KeyboardInterrupt, and says nothing."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises InterruptError where a signal ended it, UserError where there is no place to be."""
        try:
            os.getcwd()
        except FileNotFoundError as error:
            raise UserError("The working directory has been removed. Change into one that is there.") from error
        with Interrupts():
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt as error:
                raise as_error(error) from None


app = typer.Typer(
    cls=Commands,
    help="Reinforcement-learning post-training of large language models on Megatron-core, SGLang and Ray.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _say_versions(asked: bool) -> None:
    if asked:
        print(", ".join(f"{name} {installed(name) or 'is not installed'}" for name in ("megarl", *ENGINES)))
        raise typer.Exit


@app.callback()
def _of_all(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_versions, is_eager=True, help="Versions of megarl and its engines"),
    ] = False,
) -> None:
    """Options that stand in front of any command."""


app.command()(train.train)
app.command()(supervised.sft)
app.command()(supervised.rm)
app.command()(supervised.dpo)
app.command()(supervised.kto)
app.command(name="eval")(evaluate.evaluate)
app.command()(replay.replay)
app.command()(report.report)
app.command()(serve.serve)
app.command()(plan.plan)
app.command()(profile.profile)
app.command()(doctor.doctor)
app.command()(quickstart.quickstart)
app.add_typer(recipe.app, name="recipe")
app.add_typer(convert.app, name="convert")
app.add_typer(submit.app)  # submit, status, logs, cancel


def _refuse_keys_as_options(words: Sequence[str]) -> None:
    """Raise UserError where a key of the recipe is given as an option, as other systems take it: --train.steps 3."""
    for word, behind in zip(words, (*words[1:], ""), strict=False):
        key, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and "." in key:
            given = value if equals else "VALUE" if behind.startswith("-") else behind or "VALUE"
            raise UserError(f"--{key} is no option. Keys of the recipe are set without dashes: {key}={given}.")


def main() -> None:
    """A command. What an exit code means stands in docs/exit_codes.md; no stack trace for an expected error."""
    forget_no_width()
    outlive_terminal()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Texts of models and names of files have letters that the encoding of the output may lack: no reason to end a run.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _refuse_keys_as_options(sys.argv[1:])
        app(standalone_mode=True)
    except MegarlError as error:
        with suppress(OSError):  # nobody reads any more: the exit code says it
            print(f"megarl: {visible(error.told())}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # Of a write, the system does not say to what; what a run writes is told by run/ending.
        what = error.filename or "what this command writes, or the file that its output goes into"
        with suppress(OSError):
            print(f"megarl: A disk is full: {what}: {error.strerror}. Make room there.", file=sys.stderr, flush=True)
        sys.exit(FAULT)


def run() -> None:
    """The command, in a process that is this command alone.

    Where it has failed, and Ray was there, it ends at once: left while actors begin, Ray's threads crash as Python ends. So it
    does where a signal has ended it: Python takes its handlers off as it ends, and the next signal would be what ended it.
    Otherwise Python ends it, and would look through all that was loaded for garbage, several times: a second after a run.
    """
    try:
        main()
    except SystemExit as end:
        if not (isinstance(end.code, int) and end.code and ("ray" in sys.modules or end.code in BY_SIGNALS)):
            raise
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # nobody reads any more
                stream.flush()
        os._exit(end.code)
    finally:
        gc.freeze()
