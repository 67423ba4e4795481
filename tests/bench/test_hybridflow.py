"""HybridFlow in our cost model: what is drawn, what fits, and that the set that is written down finds what was published."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from bench.hybridflow import OTHERS, RANGES, draw, figures, step
from bench.support.hybridflow import ALONE, COLOCATE, FINDINGS, PARTITIONS, Pricing, Software, outcome
from bench.support.measure import RESULTS


@pytest.fixture(scope="module")
def written() -> Software:
    kept = json.loads((RESULTS / "hybridflow.json").read_text())["software"]
    return Software(**{**kept, "recompute": tuple(kept["recompute"])})


def test_draws_are_within_their_ranges_and_steps_move_two_figures_at_most() -> None:
    numbers = random.Random(0)
    for _ in range(50):
        best = draw(numbers)
        near = step(numbers, best)
        for drawn in (best, near):
            assert all(low <= figures(drawn)[name] <= high for name, (low, high) in (RANGES | OTHERS).items())
        assert sum(figures(near)[name] != figures(best)[name] for name in figures(best)) <= 2


def test_the_set_that_is_written_down_reproduces_all_that_was_published(written: Software) -> None:
    found = outcome(written)
    assert found.agree == len(FINDINGS) == 16 and found.loss == 0
    # Devices that the paper gives: 64 for the actor, 16 each for reference and reward, 32 for the critic; halves for 70B critics.
    last = dict(zip(((each.words, each.devices) for each in FINDINGS), found.best, strict=True))
    assert last["13B", 128][ALONE][1] == (64, 16, 32, 16)
    assert last["13B, critic and reward 70B", 128]["critic alone, the others together"][1] == (64, 64)


def test_where_stages_wait_for_each_other_less_is_reproduced(written: Software) -> None:
    assert outcome(replace(written, late_critic=False)).agree < 16


def test_a_step_by_hand(written: Software) -> None:
    pricing = Pricing(FINDINGS[6], written)
    parts = PARTITIONS[ALONE]
    devices = (64, 8, 16, 8)
    policy, *others = (pricing.pool(pool, each) for pool, each in zip(parts, devices, strict=True))
    assert policy is not None
    reference, critic, reward = (each for each in others if each is not None)
    path = policy.rollout + max(reference.prepare, critic.prepare, reward.prepare) + policy.train
    expected = max(path, critic.prepare + critic.train) + 3 * pricing.cluster.rates.barrier_s
    assert pricing.seconds(parts, devices) == pytest.approx(expected)


def test_generation_goes_in_waves_as_its_cache_holds(written: Software) -> None:
    """13B on 16 devices: four servers of 256 answers each, of 1,677,721,600 bytes of cache a sequence."""
    pricing = Pricing(FINDINGS[3], written)
    sequence = 2 * 40 * 5120 * 2 * 2048 / 4
    weights = 2 * 13.0e9 / 4
    seconds = pricing._rollout(np.array([weights + sequence * count + 1e8 for count in (0, 64, 128, 256)]), 16)
    assert seconds[0] == math.inf
    # Twice the sequences at once: half the waves, each slower for its larger batch.
    assert seconds[1] > seconds[2] > seconds[3] > seconds[1] / 4


def test_a_colocated_set_needs_what_all_its_models_hold(written: Software) -> None:
    """70B: 18 bytes a parameter for actor and critic, 2 for the others, over 16 devices: more than they have."""
    finding = replace(FINDINGS[12], devices=16)
    assert COLOCATE not in Pricing(finding, written).best
    assert COLOCATE in Pricing(FINDINGS[12], written).best
