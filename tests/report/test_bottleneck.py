"""The line on the bottleneck, from histories whose shares are computed by hand."""

from __future__ import annotations

import pytest

from megarl.report.bottleneck import Shares, bottleneck, shares
from megarl.report.history import Row


def history(waiting_s: float, idle: float, *, stale: float | None = None) -> list[Row]:
    """Four steps of 10 s; the first is not to count."""
    step: Row = {"perf/step_s": 10.0, "perf/rollout_s": waiting_s, "perf/servers_idle": idle}
    if stale is not None:
        step["rollout/staleness_max"] = stale
    first: Row = {**step, "step": 1, "perf/rollout_s": 9.0, "perf/servers_idle": 0.9}
    return [{"step": 0}, first, *({**step, "step": number} for number in (2, 3, 4))]


def test_shares_are_of_all_seconds_but_the_first_steps() -> None:
    rows: list[Row] = [
        {"step": 1, "perf/step_s": 100.0, "perf/rollout_s": 99.0, "perf/servers_idle": 0.0},
        {"step": 2, "perf/step_s": 6.0, "perf/rollout_s": 3.0, "perf/servers_idle": 0.5},
        {"step": 3, "perf/step_s": 2.0, "perf/servers_idle": 0.1, "rollout/staleness_max": 1.0},
    ]
    # waiting 3 of 8 s, idle (0.5 x 6 + 0.1 x 2) / 8
    assert shares(rows) == Shares(pytest.approx(0.375), pytest.approx(0.4), True)
    assert shares(rows[:1]) == Shares(pytest.approx(0.99), 0.0, False), "one step is better than none"


@pytest.mark.parametrize(
    ("rows", "said", "key"),
    [
        (history(6.0, 0.4), "take turns", "rollout.max_staleness: 1"),
        (history(3.0, 0.3, stale=1.0), "wait for each other", "higher rollout.max_staleness"),
        (history(5.0, 0.02, stale=1.0), "generation is the bottleneck", "rollout.servers"),
        (history(0.5, 0.5, stale=1.0), "training is the bottleneck", "cluster.devices"),
        (history(0.5, 0.05, stale=2.0), "both sides are at work", ""),
    ],
)
def test_what_is_said(rows: list[Row], said: str, key: str) -> None:
    line = bottleneck(rows)
    assert said in line and key in line and "\n" not in line


def test_figures_are_in_the_line() -> None:
    assert bottleneck(history(5.0, 0.02)).startswith("ranks waited for samples 50% of the time, servers were idle 2%")


def test_a_run_without_generation_has_no_such_line() -> None:
    assert bottleneck([{"step": 1, "perf/step_s": 2.0, "perf/update_s": 1.0}]) == ""
    assert bottleneck([]) == ""
