"""Shows a run that is over: its table again, from what lies in its folder. `python -m megarl.report runs/quickstart`."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from rich.console import Console

from megarl.core.errors import UserError
from megarl.core.exit_codes import FAULT
from megarl.core.metrics import PHASES
from megarl.report.curve import CURVE_FILE, draw_curve
from megarl.report.history import METRICS_FILE, read_history
from megarl.report.summary import summary_table


def main() -> None:
    """Print the table and draw the curve anew. The seconds are those of the steps alone."""
    parser = argparse.ArgumentParser(prog="python -m megarl.report", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="a run's folder")
    folder: Path = parser.parse_args().folder
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of folders have letters that its encoding may lack
    try:
        rows = read_history(folder / METRICS_FILE)
    except UserError as error:
        sys.stderr.write(f"megarl: {error}\n")
        sys.exit(error.exit_code)
    refused = _draw(folder)
    totals = {phase: sum(row.get(f"perf/{phase}_s") or 0.0 for row in rows) for phase in PHASES}
    spent = {phase: seconds for phase, seconds in totals.items() if seconds > 0}
    elapsed_s = sum(row.get("perf/step_s") or 0.0 for row in rows)
    export = folder / "hf"  # a run that goes on, or has died, has none
    table = summary_table(
        rows, spent, elapsed_s, export if export.is_dir() else None, None if refused else folder / CURVE_FILE
    )
    try:
        Console(markup=False).print(table)
    except OSError as error:
        sys.stderr.write(f"megarl: The table cannot be printed: {error.strerror or error}.\n")
        sys.exit(FAULT)
    if refused:
        sys.stderr.write(f"megarl: {folder / CURVE_FILE} cannot be written: {refused}. The table needs no file.\n")
        sys.exit(FAULT)


def _draw(folder: Path) -> str:
    """Draw the curve; why it cannot be written, as of somebody else's run, or nothing."""
    try:
        draw_curve(folder / METRICS_FILE, folder / CURVE_FILE)
    except OSError as error:
        return error.strerror or str(error)
    return ""


if __name__ == "__main__":
    main()
