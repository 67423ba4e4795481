"""Played runs: equal to the prediction where nothing varies, the same by seed, and what failures and staleness do."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from megarl.core.errors import UserError
from megarl.placement.cluster import make_cluster
from megarl.placement.lengths import lognormal
from megarl.placement.plan import make_plan
from megarl.placement.simulate import Conditions, simulate
from tests.placement.samples import GRPO, LLAMA_7B, QWEN_7B, workload

CLUSTER = make_cluster("H100", 4)
WORK = workload(QWEN_7B, GRPO, samples_per_prompt=8, mini_batches=4)
NO_FAILURES = Conditions(hours_between_failures=1e12)


def test_without_spread_every_step_is_the_predicted_one() -> None:
    work = replace(WORK, responses=lognormal(1000, 0.0, 1024))
    plan = make_plan(work, CLUSTER, name="colocate")
    played = simulate(plan.best, work, 5, NO_FAILURES)
    assert played.step_s == pytest.approx(np.full(5, plan.best.step_s), rel=0.03)
    assert played.total_s == pytest.approx(played.step_s.sum())
    assert played.failures == 0


def test_drawn_lengths_stay_around_the_prediction_and_are_the_same_by_seed() -> None:
    plan = make_plan(WORK, CLUSTER)
    one, again, other = (simulate(plan.best, WORK, 20, replace(NO_FAILURES, seed=seed)) for seed in (1, 1, 2))
    assert np.array_equal(one.step_s, again.step_s)
    assert not np.array_equal(one.step_s, other.step_s)
    assert one.step_s.mean() == pytest.approx(plan.best.step_s, rel=0.1)
    assert 0 < one.tail_s.sum() < one.rollout_s.sum()


def test_long_responses_that_run_longest_have_the_context_that_they_have_in_a_prediction() -> None:
    """Half the mean, which is the age of a response that counts as one, is too little where few are long."""
    responses = lognormal(1500, 1.5, 8192)
    work = workload(LLAMA_7B, GRPO, prompts=8192, responses=responses, longest_sample=9216, micro_tokens=(9216,))
    best = make_plan(work, make_cluster("H100", 1), name="colocate", top=1).best
    played = simulate(best, work, 2, NO_FAILURES)
    assert played.rollout_s.mean() == pytest.approx(best.phases["rollout"], rel=0.05)


def test_failures_cost_what_came_after_the_checkpoint_and_a_restart() -> None:
    plan = make_plan(WORK, CLUSTER)
    conditions = Conditions(hours_between_failures=plan.best.step_s * 32 * 8 / 3600, restart_s=100.0, save_every=4)
    played = simulate(plan.best, WORK, 40, conditions)
    assert played.failures > 0
    assert played.lost_s >= 100.0 * played.failures
    assert played.total_s == pytest.approx(played.step_s.sum() + played.lost_s)


def test_without_checkpoints_a_failure_loses_all_and_a_run_that_never_ends_is_refused() -> None:
    plan = make_plan(WORK, CLUSTER, top=1)
    conditions = Conditions(hours_between_failures=plan.best.step_s * 32 * 8 / 3600, restart_s=0.0, save_every=None)
    played = simulate(plan.best, WORK, 24, conditions)
    often = simulate(plan.best, WORK, 24, replace(conditions, save_every=1))
    assert played.lost_s > 2 * often.lost_s > 0
    with pytest.raises(
        UserError, match=r"from step 0 to its next checkpoint: 32 devices fail every .* train\.save_every"
    ):
        simulate(plan.best, WORK, 100, conditions)


def test_an_asynchronous_run_is_played_as_predicted_where_servers_never_wait() -> None:
    work = replace(WORK, prompts=32, responses=lognormal(1000, 0.3, 4096), staleness=4)
    plan = make_plan(work, CLUSTER)
    assert plan.best.asynchronous
    played = simulate(plan.best, work, 24, NO_FAILURES)
    assert played.step_s[8:-4].mean() == pytest.approx(plan.best.step_s, rel=0.1)
    assert all(0 < busy <= 1.001 * played.total_s for busy in played.busy_s)


@pytest.mark.parametrize("staleness", [1, 2])
def test_the_longest_response_is_waited_for_where_it_may_get_no_older(staleness: int) -> None:
    work = replace(WORK, prompts=32, responses=lognormal(1500, 0.9, 16_384), staleness=staleness)
    best = make_plan(work, CLUSTER, name="split").best
    assert best.asynchronous
    played = simulate(best, work, 24, NO_FAILURES)
    assert played.step_s[4:-2].mean() == pytest.approx(best.step_s, rel=0.15)


def test_lengths_of_all_steps_are_not_held_at_once() -> None:
    best = make_plan(WORK, CLUSTER, top=1).best
    simulate(best, WORK, 1, NO_FAILURES)
    peaks = []
    for steps in (2, 30):
        tracemalloc.start()
        simulate(best, WORK, steps, NO_FAILURES)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 2 * WORK.samples * 8  # of 28 steps more


def test_sixteen_thousand_devices_are_played() -> None:
    cluster = make_cluster("H100", 2048)
    work = replace(WORK, prompts=4096)
    played = simulate(make_plan(work, cluster, top=1).best, work, 3, Conditions())
    assert played.total_s > 0
    assert all(0 < busy <= played.total_s * 1.001 for busy in played.busy_s)
