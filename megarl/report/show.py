"""Shows runs that are over, or go on, from what lies in their folders: a run's table and curve again, and a page of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console, RenderableType

from megarl.core.errors import MegarlError
from megarl.core.metrics import PHASES
from megarl.report.curve import CURVE_FILE, draw_curve
from megarl.report.history import METRICS_FILE, read_history
from megarl.report.page import write_page
from megarl.report.summary import summary_table


def show_runs(folders: Sequence[Path], page: Path) -> None:
    """Write the page; of one run, also print its table and draw its curve anew. The seconds are those of the steps alone.

    Raises UserError where a folder is no run's. MegarlError where a file cannot be written, as those of somebody else's run, once
    all else is done; or where the table cannot be printed.
    """
    curve = folders[0] / CURVE_FILE if len(folders) == 1 else None
    refused = _tried(page, partial(write_page, folders, page))
    not_drawn = _tried(curve, partial(draw_curve, folders[0] / METRICS_FILE, curve)) if curve else ""
    try:
        console = Console(markup=False, soft_wrap=True)
        if curve:
            console.print(_table(folders[0], None if not_drawn else curve))
        if not refused:
            console.print(f"page     {page}", highlight=False)
    except OSError as error:
        raise MegarlError(f"The table cannot be printed: {error.strerror or error}.") from error
    if refused:
        raise MegarlError(f"{refused} Name another place with --out.")
    if not_drawn:
        raise MegarlError(f"{not_drawn} The table and the page need no such file.")


def _table(folder: Path, curve: Path | None) -> RenderableType:
    rows = read_history(folder / METRICS_FILE)
    totals = {phase: sum(row.get(f"perf/{phase}_s") or 0.0 for row in rows) for phase in PHASES}
    spent = {phase: seconds for phase, seconds in totals.items() if seconds > 0}
    elapsed_s = sum(row.get("perf/step_s") or 0.0 for row in rows)
    export = folder / "hf"  # a run that goes on, or has died, has none
    return summary_table(rows, spent, elapsed_s, export if export.is_dir() else None, curve)


def _tried(file: Path, write: Callable[[], None]) -> str:
    """Why a file cannot be written, as a sentence; empty where it is."""
    try:
        write()
    except OSError as error:
        return f"{file} cannot be written: {error.strerror or error}."
    return ""
