"""What the page of a run holds (page.py): its metrics, thinned; samples to read; what its recipe says. Nothing is drawn here."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megarl.core.errors import UserError
from megarl.core.metrics import METRICS, row_of
from megarl.recipe.save import RECIPE_FILE
from megarl.report.history import METRICS_FILE, Row, read_history

MOST_POINTS = 1000  # of one line: a chart has fewer pixels across
MOST_FILES = 60  # of samples, of training and of evaluations each
MOST_CHARACTERS = 20_000  # of one text of a sample
MOST_SAMPLES_BYTES = 16 * 2**20  # of all samples of a page: a browser opens it at once
SAMPLES_FOLDER = "samples"
KINDS = ("step", "eval")  # of files of samples, before their step
TEXTS = ("prompt", "response", "answer", "grade_failure", "failure", "trace")


@dataclass(frozen=True)
class RunData:
    """A run as its folder has it. recipe: every key with its value, by dotted name."""

    name: str
    rows: list[Row]
    samples: list[dict[str, Any]]  # of a file each: kind, step, rows
    left_out: int  # files of samples that the page does not hold
    recipe: dict[str, Any]


def read_run(folder: Path, name: str, most_bytes: int = MOST_SAMPLES_BYTES) -> RunData:
    """Raises UserError where the folder is no run's, or a file of it cannot be read."""
    rows = read_history(folder / METRICS_FILE)
    samples, left_out = read_samples(folder / SAMPLES_FOLDER, most_bytes)
    return RunData(name, rows, samples, left_out, read_recipe(folder / RECIPE_FILE))


def names_of(folders: Sequence[Path]) -> list[str]:
    """How each run is called on the page: its folder's name, with as much of the path before it as tells it from the others."""
    parts = [folder.resolve().parts for folder in folders]
    count = 1
    while len({each[-count:] for each in parts}) < len({*parts}) and count < max(map(len, parts)):
        count += 1
    return ["/".join(each[-count:]) for each in parts]


def lines_of(rows: Sequence[Row]) -> dict[str, dict[str, list[Any]]]:
    """Steps and values of each metric, thinned; a value that is no finite number is null."""
    found: dict[str, dict[str, list[Any]]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                line = found.setdefault(name, {"steps": [], "values": []})
                line["steps"].append(row["step"])
                line["values"].append(value if math.isfinite(value) else None)
    return {name: _thinned(line["steps"], line["values"]) for name, line in found.items()}


def _thinned(steps: list[int], values: list[float | None], most: int = MOST_POINTS) -> dict[str, list[Any]]:
    """At most so many points: of each stretch of steps the lowest and the highest, so that every peak stays."""
    if len(steps) <= most:
        return {"steps": steps, "values": values}
    kept: list[int] = [0, len(steps) - 1]
    stretches = most // 2 - 1
    for number in range(stretches):
        stretch = range(number * len(steps) // stretches, (number + 1) * len(steps) // stretches)
        there = [(value, at) for at in stretch if (value := values[at]) is not None]
        kept += [min(there)[1], max(there)[1]] if there else [stretch[0]]
    places = sorted({*kept})
    return {"steps": [steps[at] for at in places], "values": [values[at] for at in places]}


def meanings(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Unit and meaning of metrics, as the table has them; another version's may be unknown to it."""
    known = {name: METRICS[row_of(name)] for name in names if row_of(name) in METRICS}
    return {name: {"unit": spec.unit, "meaning": spec.meaning} for name, spec in known.items()}


def read_samples(folder: Path, most_bytes: int = MOST_SAMPLES_BYTES) -> tuple[list[dict[str, Any]], int]:
    """Files of samples, by kind and step: the first, the last, and some between; and how many are left out.

    A line that is no JSON, as a disk that was full leaves it, is passed over.
    """
    found, left_out, held = [], 0, 0
    for kind in KINDS:
        files = sorted(
            (int(path.stem.rpartition("_")[2]), path) for path in folder.glob(f"{kind}_*.jsonl") if _numbered(path)
        )
        chosen = spread(len(files), MOST_FILES)
        for at in chosen:
            rows = [row for line in files[at][1].read_bytes().splitlines() if (row := _sample(line)) is not None]
            size = len(json.dumps(rows))
            if held + size <= most_bytes / len(KINDS) * (1 + KINDS.index(kind)):
                held += size
                found.append({"kind": kind, "step": files[at][0], "rows": rows})
            else:
                left_out += 1
        left_out += len(files) - len(chosen)
    return sorted(found, key=lambda file: (file["kind"], file["step"])), left_out


def spread(count: int, most: int) -> list[int]:
    """At most so many of `count` places, evenly, from the last on: what is left out for want of room is from between."""
    if count <= most:
        return list(range(count))[::-1]
    return sorted({round(number * (count - 1) / (most - 1)) for number in range(most)}, reverse=True)


def _numbered(path: Path) -> bool:
    return path.stem.rpartition("_")[2].isdecimal()


def _sample(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict):
        return None
    return {key: _cut(value) if key in TEXTS else value for key, value in row.items()}


def _cut(text: Any) -> Any:
    text = json.dumps(text, ensure_ascii=False) if isinstance(text, list | dict) else text
    if not isinstance(text, str) or len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"


def read_recipe(file: Path) -> dict[str, Any]:
    """Every key of a saved recipe with its value, by dotted name; empty where there is none. Raises UserError."""
    if not file.is_file():
        return {}
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"{file} cannot be read ({why}). A run writes it; put it back, or remove it.") from error
    return flat(found) if isinstance(found, dict) else {}


def flat(tree: dict[str, Any], before: str = "") -> dict[str, Any]:
    """`{a: {b: 1}}` as `{a.b: 1}`."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, dict) and value else {f"{before}{key}": value}
    return found


def differences(recipes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keys of which not all recipes say the same, with what each says; `run.name` and `run.dir` tell nothing."""
    keys = sorted({key for recipe in recipes for key in recipe} - {"run.name", "run.dir"})
    said = {key: [_written(recipe, key) for recipe in recipes] for key in keys}
    return [{"key": key, "values": values} for key, values in said.items() if len({*values}) > 1]


def _written(recipe: dict[str, Any], key: str) -> str:
    return json.dumps(recipe[key], ensure_ascii=False, default=str) if key in recipe else "-"
