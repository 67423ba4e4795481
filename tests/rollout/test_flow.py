"""Tokens a second and idle servers of the time since the last step, by a clock by hand."""

from __future__ import annotations

from megarl.rollout.flow import Flow
from megarl.rollout.tasks import Load


def test_a_rate_is_of_what_was_made_since_the_last_step() -> None:
    now = [0.0]
    flow = Flow(2, lambda: now[0])
    flow.begins()
    now[0] = 4.0
    flow.made(100)
    flow.ends()
    now[0] = 5.0
    first = flow.metrics({0: Load(4.0, 0, 0.25), 1: Load(2.0, 3, 0.5)}, 0.125)
    assert first["perf/rollout_tokens_per_s"] == 25.0, "100 tokens in 4 seconds of work"
    assert first["perf/generation_s"] == 4.0
    assert first["perf/servers_idle"] == 1 - 3.0 / 5.0
    assert first["rollout/requests_queued"] == 3.0
    assert first["perf/journal_s"] == 0.625, "of the busiest collector and of the decisions"
    now[0] = 7.0
    flow.forget(1)  # another collector, which counts from nothing
    second = flow.metrics({0: Load(4.0, 0, 0.5), 1: Load(0.0, 0, 0.125)}, 0.25)
    assert second["perf/rollout_tokens_per_s"] == 0.0, "a step of groups that were there already made nothing"
    assert second["perf/servers_idle"] == 1.0
    assert second["perf/journal_s"] == 0.25 + 0.125
