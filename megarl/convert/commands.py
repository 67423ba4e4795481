"""What `megarl convert` does: calls the conversion, prints what came of it. Its options are in megarl/commands/convert.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast, get_args

from rich.console import Console
from rich.table import Table

from megarl.convert.convert import Outcome, Settings, hf_to_mcore, make_layout, mcore_to_hf, outcome_json, reshard
from megarl.convert.inspection import inspect, render
from megarl.convert.job import Operation
from megarl.convert.text_part import check_multimodal, into_multimodal, text_part
from megarl.core.errors import DamageError, MegarlError, UserError
from megarl.hub.recipe import local_model
from megarl.models.hf_dtypes import ModelDtype
from megarl.placement.workload import read_model

SHOWN = 50


def run_convert(
    operation: Operation,
    source: Path,
    target: Path,
    axes: dict[str, Any],
    dtype: str | None,
    settings: Settings,
    *,
    as_json: bool,
) -> int:
    """Convert; returns the exit code: 1 where what was written is not what was read."""
    if dtype is not None and dtype not in get_args(ModelDtype):
        raise UserError(f"--dtype is {dtype}; it can be {' or '.join(get_args(ModelDtype))}.")
    layout, console = make_layout(**axes), Console(stderr=True, markup=False)
    if operation == "reshard":
        outcome = reshard(source, target, layout, settings, console)
    else:
        convert = hf_to_mcore if operation == "hf-to-mcore" else mcore_to_hf
        if operation == "hf-to-mcore":
            source = local_model(source, "SRC", read_model, console.print)
        outcome = convert(source, target, layout, cast("ModelDtype | None", dtype), settings, console)
    if as_json:
        print(outcome_json(outcome))
    else:
        _print(outcome, settings, Console(markup=False))
    return 1 if outcome.differences else 0


def run_text_part(source: Path, target: Path, *, force: bool, as_json: bool) -> None:
    """Write the text part of a multimodal folder, which may also be named on the hub."""
    console = Console(stderr=True, markup=False)
    source = local_model(source, "MULTIMODAL", check_multimodal, console.print)
    _show(text_part(source, target, force=force, console=console), as_json=as_json)


def run_into_multimodal(text: Path, source: Path, target: Path, *, force: bool, as_json: bool) -> None:
    """Write a multimodal folder again, with the weights of a text folder."""
    console = Console(stderr=True, markup=False)
    source = local_model(source, "MULTIMODAL", check_multimodal, console.print)
    _show(into_multimodal(text, source, target, force=force, console=console), as_json=as_json)


def _show(outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        print(outcome_json(outcome))
    else:
        _print(outcome, Settings(), Console(markup=False))


def _print(outcome: Outcome, settings: Settings, out: Console) -> None:
    if outcome.differences:
        table = Table("tensor", "field", "before", "after", title="Differences", title_justify="left")
        for row in outcome.differences[:SHOWN]:
            table.add_row(*row)
        out.print(table)
        more = len(outcome.differences) - SHOWN
        out.print(f"{f'and {more} more. ' if more > 0 else ''}{outcome.target} was not written.", highlight=False)
        return
    verified = f"; {outcome.num_verified} tensors read back and found equal" if settings.verify else ""
    out.print(f"{outcome.target}: {outcome.num_bytes:,} bytes{verified}", highlight=False, soft_wrap=True)


def run_inspect(path: Path, *, as_json: bool, quick: bool) -> int:
    """Show what is at a path; returns the exit code: 1 where it is damaged."""
    try:
        found = inspect(path, read=not quick)
    except DamageError as error:
        raise MegarlError(str(error)) from error  # what was asked for, and no mistake of who asks
    if as_json:
        print(found.to_json())
    else:
        Console(markup=False).print(render(found))
    return 1 if found.damage else 0
