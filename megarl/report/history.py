"""metrics.jsonl, the record of a run: one JSON object a line, `step` and the step's metrics. Reading and trimming it."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import orjson

from megarl.core.disk import replace_text
from megarl.core.errors import UserError
from megarl.core.log import get_logger
from megarl.core.words import some

METRICS_FILE = "metrics.jsonl"
SHOWN = 5
Row = dict[str, Any]

log = get_logger(__name__)


def read_history(file: Path) -> list[Row]:
    """The rows, in order. A last line that a killed run left half-written is not a row.

    Raises UserError where the file is missing or cannot be read, or another line is not a row.
    """
    if not file.is_file():
        what = "is not a file" if file.exists() else "does not exist"
        runs = sorted(str(each.parent) for each in file.parent.glob(f"*/{METRICS_FILE}"))
        inside = f" Runs in {file.parent}: {some(runs, SHOWN)}." if runs else ""
        raise UserError(f"{file} {what}: a run writes it into its folder from its first step on.{inside}")
    try:
        lines = file.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}.") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            break
        try:
            row = _parsed(line)
        # Bytes that are no text, and numbers of thousands of digits, are ValueErrors, too.
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}, line {number} is not JSON ({error}). Remove that line, or the file.") from None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise UserError(f'{file}, line {number} is not a row of metrics: it must be an object with a whole "step".')
        rows.append(row)
    return rows


def _parsed(line: bytes) -> Any:
    """Raises ValueError, RecursionError."""
    try:
        return orjson.loads(line)  # many times as fast, of rows of a hundred thousand steps
    except orjson.JSONDecodeError:
        return json.loads(line.decode("utf-8"))  # with NaN, as others may have written it


def trim_history(file: Path, last_step: int) -> None:
    """Keep the rows up to last_step, one a step, and drop what a run wrote after the checkpoint that is gone on from.

    Rows that are missing are told: nothing but tables and pictures needs them.
    """
    found = {row["step"]: row for row in read_history(file)} if file.exists() else {}
    rows = [found[step] for step in sorted(found) if step <= last_step]
    if missing := sorted({*range(1, last_step + 1)} - found.keys()):
        shown = some([*map(str, missing)], SHOWN)
        log.warning("%s has no line of step %s: the run goes on without", file, shown)
    replace_text(file, "".join(json.dumps(row) + "\n" for row in rows), lasting=True)


def series(rows: list[Row], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where a row has it as a number that is finite."""
    found = [(row["step"], float(row[name])) for row in rows if is_number(row.get(name))]
    return [step for step, _ in found], [value for _, value in found]


def best_steps(file: Path, metric: str, *, lowest: bool, count: int, steps: Collection[int]) -> set[int]:
    """Of these steps the `count` whose rows have the best value of a metric; of equal ones the later. Steps without it are none.

    All of them where the rows cannot be read: nothing is lost then.
    """
    try:
        values = {row["step"]: row[metric] for row in read_history(file) if is_number(row.get(metric))}
    except UserError as error:
        log.warning("Which checkpoints are the best by %s is not known, and all are kept. %s", metric, error)
        return set(steps)
    known = [step for step in steps if step in values]
    return set(sorted(known, key=lambda step: (-values[step] if lowest else values[step], step))[-count:])


def is_number(value: object) -> bool:
    """Whether a row's value is one that can be drawn; others may have written infinities, or words."""
    return isinstance(value, int | float) and math.isfinite(value)
