"""What bench/kills says of cells: of those that were run, that failed, and that did not come about, by what was seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.kills import PEACE, compare, is_same, render
from bench.support.killed_runs import Cell, Sought

SAME: dict[str, Any] = {"kind": "rank", "phase": "update", "step": 3, "then": "recovered"} | {
    "same_weights": True,
    "same_metrics": True,
    "first": [],
}


@pytest.mark.parametrize(
    ("phases", "with_process", "why"),
    [
        (set(), set(), "the phase was not seen"),
        ({1, 2, 3}, set(), "no grader is there, in 3 such phases"),
        ({1, 2, 3}, {2, 3}, "over before the kill, 2 times"),
    ],
)
def test_why_a_cell_did_not_come_about_is_what_was_seen(phases: set[int], with_process: set[int], why: str) -> None:
    assert Sought(Cell("grader", "save"), phases, with_process).why == why


def test_the_page_tells_what_became_of_each_cell() -> None:
    cells: list[dict[str, Any]] = [
        SAME,
        {**SAME, "phase": "save", "same_metrics": False, "first": ["step 4: actor/loss"]},
        {"kind": "grader", "phase": "start", "then": "absent", "why": "no grader is there, in 2 such phases"},
        {"kind": "router", "phase": "sync", "step": 2, "then": "failed", "why": "struck-1 ended with code 1"},
    ]
    page = render(cells)
    assert (
        "| rank |  |  |  |  | recovered by itself |  | recovered by itself; **others** from step 4: actor/loss on |  |"
        in page
    )
    assert "| grader | does not come about: no grader is there, in 2 such phases |" in page
    assert "| **failed**: struck-1 ended with code 1 |" in page
    assert "3 of 72 cells were run; in 1 of them weights and metrics are the same. 1 do not come about." in page
    assert [is_same(cell) for cell in cells] == [True, False, False, False]


def written(run: Path, rows: list[dict[str, float]], weights: bytes) -> Path:
    (run / "hf").mkdir(parents=True)
    (run / "hf" / "model.safetensors").write_bytes(weights)
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return run


def test_runs_are_the_same_to_the_last_digit_or_the_first_that_is_other_is_named(tmp_path: Path) -> None:
    rows = [{"step": step, "actor/loss": 0.1 * step, "perf/step_s": 1.0} for step in (1, 2)]
    peace = written(tmp_path / PEACE, rows, b"w")
    slower = [{**row, "perf/step_s": 2.0} for row in rows]
    assert is_same(compare(written(tmp_path / "slower", slower, b"w"), peace))
    found = compare(written(tmp_path / "other", [rows[0], {**rows[1], "actor/loss": 0.2000001}], b"v"), peace)
    assert found == {"same_weights": False, "same_metrics": False, "first": ["step 2: actor/loss"]}
    assert not is_same(compare(written(tmp_path / "shorter", rows[:1], b"w"), peace))
