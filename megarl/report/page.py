"""One page of a run or several, to be opened in a browser: charts of all metrics, samples to read, what the recipes differ in.

It is one file that asks nobody for anything: what it shows is within it, as JSON, and page.html beside this file draws it. Texts
of models are shown as text, whatever they hold.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from megarl.core.errors import UserError
from megarl.report.curve import PANELS
from megarl.report.page_data import (
    MOST_SAMPLES_BYTES,
    RunData,
    differences,
    lines_of,
    meanings,
    names_of,
    read_run,
)

PAGE_FILE = "page.html"
TEMPLATE, DATA_HERE = "page.html", "/* the data */"
MOST_RUNS = 8  # as many colours are told apart
FIRST = tuple(line.name for panel in PANELS for line in panel.lines)  # metrics that are shown before all others


def write_page(folders: Sequence[Path], target: Path) -> None:
    """Write the page of runs, each in a folder. Whole, or not at all.

    Raises UserError: a folder that is no run's, too many, one named twice; OSError where the page cannot be written.
    """
    if len(folders) > MOST_RUNS:
        raise UserError(f"{len(folders)} runs on one page, which has colours for {MOST_RUNS}. Name fewer.")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("A run is named more than once. Name each run's folder once.")
    names = names_of(folders)
    share = MOST_SAMPLES_BYTES // len(folders)
    runs = [read_run(folder, name, share) for folder, name in zip(folders, names, strict=True)]
    text = files("megarl.report").joinpath(TEMPLATE).read_text(encoding="utf-8")
    half = target.with_name(f".{target.name}.{os.getpid()}")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        half.write_text(text.replace(DATA_HERE, embedded(page_data(runs))), encoding="utf-8", errors="replace")
        half.replace(target)
    except OSError:
        with suppress(OSError):
            half.unlink()
        raise


def page_data(runs: Sequence[RunData]) -> dict[str, Any]:
    """All that the page shows, as plain values."""
    lines = [lines_of(run.rows) for run in runs]
    names = list(dict.fromkeys(name for each in lines for name in each))
    return {
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "runs": [
            {
                "name": run.name,
                "step": run.rows[-1]["step"] if run.rows else 0,
                "lines": each,
                "samples": run.samples,
                "left_out": run.left_out,
                "recipe": {
                    key: json.dumps(value, ensure_ascii=False, default=str) for key, value in run.recipe.items()
                },
            }
            for run, each in zip(runs, lines, strict=True)
        ],
        "metrics": meanings(names),
        "names": names,
        "first": [name for name in FIRST if name in names],
        "differences": differences([run.recipe for run in runs]) if len(runs) > 1 else [],
    }


def embedded(data: dict[str, Any]) -> str:
    """JSON that may stand within an HTML element: no text in it can end the element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
