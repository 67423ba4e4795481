"""What the book of an asynchronous run is checked for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import async_kills
from bench.async_kills import PROMPTS, SAMPLES, book, is_good
from megarl.rollout.decisions import Decisions
from megarl.rollout.ledger import Key

STEPS = 4


def keys(step: int) -> list[Key]:
    return [(PROMPTS * (step - 1) + row, step, 0) for row in range(PROMPTS)]


def found(folder: Path, monkeypatch: pytest.MonkeyPatch, taken: dict[int, list[Key]], **row: float) -> dict[str, Any]:
    """The book of a run that asked for a step's groups one step before, and took these."""
    everything = {key for step in range(1, STEPS + 2) for key in keys(step)}

    async def decide() -> None:
        decisions = Decisions(folder / "journal")
        decisions.resume(0)
        decisions.add("admitted", 1, keys(1))
        for step in range(1, STEPS + 1):
            decisions.add("admitted", step, keys(step + 1))
            decisions.add("taken", step, taken.get(step, keys(step)))
        await decisions.close()

    asyncio.run(decide())
    monkeypatch.setattr(async_kills, "written", lambda journal: everything)
    plain = {"rollout/num_samples": PROMPTS * SAMPLES, "rollout/staleness_max": 1, **row}
    rows = [{"step": step, **plain} for step in range(STEPS + 1)]
    driver: Any = SimpleNamespace(folder=folder, metrics=lambda: rows)
    return {"book": book(driver, STEPS), "replay": {"same_weights": True}}


def test_a_run_that_took_everything_once_is_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = found(tmp_path, monkeypatch, {})
    assert is_good(result), result
    assert result["book"]["groups"] == STEPS * PROMPTS
    assert not is_good({**result, "replay": {"same_weights": False}})


@pytest.mark.parametrize(
    ("taken", "row", "wrong"),
    [
        ({3: keys(2)}, {}, {"taken_twice": PROMPTS, "lost": 0}),
        ({2: keys(2)[1:]}, {}, {"steps_short": 1, "lost": 1}),
        ({2: [*keys(2)[1:], (99, 2, 0)]}, {}, {"taken_unasked": 1, "lost": 1, "unwritten": 1}),
        ({}, {"rollout/num_samples": 15}, {"samples_short": STEPS}),
        ({}, {"rollout/staleness_max": 2}, {"staleness_max": 2}),
    ],
)
def test_what_is_lost_doubled_or_too_old_is_seen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    taken: dict[int, list[Key]],
    row: dict[str, float],
    wrong: dict[str, int],
) -> None:
    result = found(tmp_path, monkeypatch, taken, **row)
    assert not is_good(result)
    assert wrong.items() <= result["book"].items(), result
