"""Shows a run that is over, or goes on: its table again, and its curve, from what lies in its folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from megarl.core.errors import MegarlError
from megarl.core.metrics import PHASES
from megarl.report.curve import CURVE_FILE, draw_curve
from megarl.report.history import METRICS_FILE, read_history
from megarl.report.summary import summary_table


def show_run(folder: Path) -> None:
    """Print the table and draw the curve anew. The seconds are those of the steps alone.

    Raises UserError where the folder is no run's, MegarlError where the curve cannot be written, as of somebody else's run; the
    table is printed all the same.
    """
    rows = read_history(folder / METRICS_FILE)
    totals = {phase: sum(row.get(f"perf/{phase}_s") or 0.0 for row in rows) for phase in PHASES}
    spent = {phase: seconds for phase, seconds in totals.items() if seconds > 0}
    elapsed_s = sum(row.get("perf/step_s") or 0.0 for row in rows)
    export = folder / "hf"  # a run that goes on, or has died, has none
    curve = folder / CURVE_FILE
    problem = None
    try:
        with told(curve):
            draw_curve(folder / METRICS_FILE, curve)
    except MegarlError as error:
        problem = error
    table = summary_table(rows, spent, elapsed_s, export if export.is_dir() else None, None if problem else curve)
    Console(markup=False).print(table)
    if problem is not None:
        raise problem


@contextmanager
def told(file: Path) -> Iterator[None]:
    """What the system says of a file that cannot be written, as a MegarlError."""
    try:
        yield
    except OSError as error:
        raise MegarlError(
            f"{file} cannot be written: {error.strerror or error}. Name another place with --out."
        ) from error
