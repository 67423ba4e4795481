"""Starts of a job that come further, and starts in vain: counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.launch.progress import reached, vain_starts


def written(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def start(restart: int, step: int, job: str = "7") -> dict[str, Any]:
    return {"job": job, "restart": restart, "event": "started", "reached": step}


def requeued(restart: int, lost: int) -> dict[str, Any]:
    return {"job": "7", "restart": restart, "event": "requeued", "lost": lost}


def test_the_last_step_is_found_also_behind_a_torn_line(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert reached(metrics) == 0
    written(metrics, {"step": 0}, {"step": 1}, {"step": 2})
    metrics.write_text(metrics.read_text() + '{"step": 3, "lo')
    assert reached(metrics) == 2
    written(metrics, {"step": 2}, {"reward/mean": 0.5}, {"step": "many"})
    assert reached(metrics) == 2


def test_a_line_of_events_that_is_no_event_is_passed_over(tmp_path: Path) -> None:
    assert vain_starts(written(tmp_path / "events", {"job": "7"}, start(0, 5)), "7", 5) == 1


@pytest.mark.parametrize(
    ("steps", "now", "vain"),
    [
        ([], 0, 0),
        ([0], 0, 1),
        ([0], 4, 0),
        ([0, 0, 0], 0, 3),
        ([0, 5, 5], 5, 2),
        ([0, 5, 5], 6, 0),
        ([0, 5, 4], 5, 2),  # the third went back to the checkpoint, and came no further than the second had been
        ([0, 5, 4], 4, 2),
        ([0, 5, 4], 6, 0),
    ],
)
def test_starts_without_a_further_step(tmp_path: Path, steps: list[int], now: int, vain: int) -> None:
    events = written(tmp_path / "events", *(start(index, step) for index, step in enumerate(steps)))
    assert vain_starts(events, "7", now) == vain


def test_what_was_asked_to_stop_and_other_jobs_do_not_count(tmp_path: Path) -> None:
    lines = [start(0, 0), requeued(0, 1), start(1, 0), requeued(1, 0), start(2, 0), start(0, 0, "8")]
    events = written(tmp_path / "events", *lines)
    assert vain_starts(events, "7", 0) == 2  # the first lost a node; the third was ended by SLURM, which said nothing
    assert vain_starts(events, "8", 0) == 1
