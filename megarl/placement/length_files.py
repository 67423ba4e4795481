"""Reads how long responses were from files: samples, a peer's log or metrics, or plain numbers.

Accepted, by what is in a file (docs/placement.md has a table): rows of JSONL or Parquet with a count of tokens, their ids or
their text; metrics of megarl, verl, slime and TRL, in JSON or in a console's lines; one number a line. Anything
else is refused, with what is accepted. Not for prompts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.core.errors import UserError
from megarl.data.rows import JSONL_SUFFIXES, PARQUET_SUFFIXES, read_rows
from megarl.placement.lengths import ASSUMED_SPREAD, Lengths, counted, lognormal, with_cut_share

# Fields of a sample's row, in the order in which they are looked for.
COUNTS = (
    "response_tokens",
    "response_length",
    "response_len",
    "completion_tokens",
    "completion_length",
    "output_tokens",
)
IDS = ("response_ids", "completion_ids", "output_ids")
TEXTS = ("response", "completion", "output")


@dataclass(frozen=True)
class Names:
    """What a framework calls a step's metrics: mean length of responses, share cut by the limit, the longest; mean prompt."""

    mean: str
    cut: str
    longest: str
    prompt: str | None = None


# slime's names begin as some of megarl's do, and are others.
_SLIME = "rollout/"
METRICS = (
    Names("rollout/response_len_mean", "rollout/truncated", "rollout/response_len_max", "rollout/prompt_len_mean"),
    Names("response_length/mean", "response_length/clip_ratio", "response_length/max", "prompt_length/mean"),
    Names(f"{_SLIME}response_len/mean", f"{_SLIME}truncated_ratio", f"{_SLIME}response_len/max"),
    Names("completions/mean_length", "completions/clipped_ratio", "completions/max_length"),
)
ACCEPTED = (
    f"JSONL or Parquet with a row a sample, which has a count ({', '.join(COUNTS)}), ids ({', '.join(IDS)}) or text "
    f"({', '.join(TEXTS)}) of its response; metrics or a console's log of megarl, verl, slime or TRL (mean lengths: "
    f"{', '.join(names.mean for names in METRICS)}); or a text or CSV file with one number a line"
)
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Read:
    """What was read. words: how much of what. prompt_tokens: mean, where a log has it."""

    responses: Lengths
    words: str
    prompt_tokens: float | None = None


def read_lengths(path: Path, limit: float, count_tokens: CountTokens) -> Read:
    """The lengths of a file, or of a folder of samples, cut at the recipe's limit. count_tokens: of a text.

    Raises UserError: missing, none of the accepted forms, lengths that cannot be.
    """
    if path.is_dir():
        files = sorted((path / "samples").glob("*.jsonl")) or sorted(path.glob("*.jsonl"))
        # A run's evaluations are beside its steps: other prompts, another temperature.
        files = [file for file in files if not file.name.startswith("eval_")] or files
        if not files:
            raise _refused(path, "the folder has no .jsonl files")
        found = [length for file in files for length in _samples(file, count_tokens) or ()]
        if not found:
            raise _refused(path, f"no row of its {len(files)} files has a length")
        return Read(counted(_checked(found, path), limit), f"{len(found)} samples of {len(files)} files")
    if not path.is_file():
        raise UserError(f"There is no file or folder of lengths at {path}. Correct --lengths. Accepted: {ACCEPTED}.")
    samples = _samples(path, count_tokens) if path.suffix in (*JSONL_SUFFIXES, *PARQUET_SUFFIXES) else None
    samples = samples or (None if path.suffix in PARQUET_SUFFIXES else _numbers(path))
    if samples:
        return Read(counted(_checked(samples, path), limit), f"{len(samples)} samples")
    steps = None if path.suffix in PARQUET_SUFFIXES else _metrics(_text(path))
    if not steps:
        raise _refused(path, "it has none of these")
    prompts = [step.prompt for step in steps if step.prompt is not None and 0 < step.prompt < math.inf]
    prompt = sum(prompts) / len(prompts) if prompts else None
    return Read(_of_steps(steps, path, limit), f"{len(steps)} steps of metrics", prompt)


def _refused(path: Path, why: str) -> UserError:
    return UserError(f"{path}: no lengths can be read from it: {why}. Accepted: {ACCEPTED}.")


def _checked(found: Sequence[float], path: Path) -> Sequence[float]:
    wrong = next((length for length in found if not 0 <= length < math.inf), None)
    if wrong is not None or max(found) == 0:
        what = "no length above 0" if wrong is None else f"a length of {wrong:g} tokens"
        raise UserError(f"{path}: there is {what}. Lengths are numbers of tokens; correct the file.")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise _refused(path, "it is not text") from None


def _samples(path: Path, count_tokens: CountTokens) -> list[float] | None:
    """Length of every row that has one; None where none has, or a row is no object."""
    found: list[float] = []
    try:
        for row in read_rows(path):
            length = _sample_length(row.fields, count_tokens)
            if length is not None:
                found.append(length)
    except UserError:
        if not found:
            return None
        raise
    return found or None


def _sample_length(fields: dict[str, Any], count_tokens: CountTokens) -> float | None:
    for name in COUNTS:
        if isinstance(value := fields.get(name), int | float) and not isinstance(value, bool):
            return _as_float(value)
    for name in IDS:
        if isinstance(value := fields.get(name), list):
            return float(len(value))
    for name in TEXTS:
        if isinstance(value := fields.get(name), str):
            return float(count_tokens(value))
    return None


def _as_float(value: float) -> float:
    """A number of JSON, whose whole ones have no end."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _numbers(path: Path) -> list[float] | None:
    """A column of numbers; the first line may name it. None for anything else."""
    lines = [line.strip().strip('"') for line in _text(path).splitlines() if line.strip()]
    if lines and not re.fullmatch(_NUMBER, lines[0]):
        lines = lines[1:]
    if not lines or not all(re.fullmatch(_NUMBER, line) for line in lines):
        return None
    return [float(line) for line in lines]


@dataclass(frozen=True)
class _Step:
    """A step's metrics; what it does not have is None."""

    mean: float
    cut: float | None
    longest: float | None
    prompt: float | None


def _metrics(text: str) -> list[_Step]:
    """Steps of the first of METRICS that a text has: objects of JSON, or names and values in the lines of a log."""
    objects = list(_objects(text))
    for names in METRICS:
        found = [step for each in objects if (step := _step_of(each, names))] or list(_logged(text, names))
        if found:
            return found
    return []


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """All objects of a JSON text, or of its lines, within one another too."""
    try:
        values = [json.loads(text)]
    except (ValueError, RecursionError):
        values = []
        for line in text.splitlines():
            with suppress(ValueError, RecursionError):
                values.append(json.loads(line))
    waiting = values[::-1]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        waiting += reversed([each for each in inside if isinstance(each, dict | list)])


def _step_of(metrics: dict[str, Any], names: Names) -> _Step | None:
    def value(name: str | None) -> float | None:
        found = metrics.get(name) if name else None
        return _as_float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None

    mean = value(names.mean)
    return None if mean is None else _Step(mean, value(names.cut), value(names.longest), value(names.prompt))


def _logged(text: str, names: Names) -> Iterator[_Step]:
    """A step is the line of its mean; a console may have broken it, so that the rest follows before the next mean."""

    def pattern(name: str) -> str:
        # Names that end alike are others.
        return rf"(?<![\w/]){re.escape(name)}[\"']?\s*[:=]\s*(?:np\.float\d+\()?({_NUMBER})"

    marks = list(re.finditer(pattern(names.mean), text))
    starts = [*(mark.start() for mark in marks), len(text)]
    for mark, end in zip(marks, starts[1:], strict=True):
        line = text[text.rfind("\n", 0, mark.start()) + 1 : mark.start()]
        step = line + text[mark.end() : end]

        def value(name: str | None, step: str = step) -> float | None:
            found = re.search(pattern(name), step) if name else None
            return float(found[1]) if found else None

        yield _Step(float(mark[1]), value(names.cut), value(names.longest), value(names.prompt))


def _of_steps(steps: Sequence[_Step], path: Path, limit: float) -> Lengths:
    """Log-normal with the mean of all steps and, where the log says what share was cut and where, that share."""
    mean = sum(step.mean for step in steps) / len(steps)
    _checked([step.mean for step in steps], path)
    cuts = [step.cut for step in steps if step.cut is not None]
    wrong = next((cut for cut in cuts if not 0 <= cut <= 1), None)
    if wrong is not None:
        raise UserError(
            f"{path}: the limit is said to cut a share of {wrong:g}. A share is from 0 to 1; correct the file."
        )
    cut, longest = sum(cuts) / max(len(cuts), 1), max((step.longest or 0.0 for step in steps), default=0.0)
    if 0 < cut < 1 and mean < longest:
        return with_cut_share(mean, cut, longest, limit)
    return lognormal(min(mean, 0.999 * limit), ASSUMED_SPREAD, limit)


def read_samples(folder: Path) -> list[float]:
    """Lengths of the samples that a run of megarl wrote down. Raises UserError: a line that is none.

    A collector that came in another's place has none of the step's samples, and writes an empty file.
    """
    found = []
    for file in sorted((folder / "samples").glob("step_*.jsonl")):
        # By newlines alone: a response may hold other characters at which str.splitlines breaks.
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
            if not line.strip():
                continue
            try:
                found.append(float(json.loads(line)["response_tokens"]))
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"{file}, line {number} is not a sample with its response_tokens. Remove that line, or the file."
                ) from None
    return found
