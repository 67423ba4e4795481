"""With one collector the two turns give, to the bit, what `Advantages.of_step` gives in one. Goes when that goes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.types import Column, FloatArray, MicroBatch, MiniBatch, Shard
from megarl.data.pack import FILLER_INDEX
from megarl.rollout.advantages import Advantages
from megarl.rollout.step_advantages import StepAdvantages
from tests.rollout.advantage_cases import CASES, roles_of
from tests.rollout.steps import Step, block_of, end_to_end, learn, random_step


def parts_of(step: Step, shard: int) -> list[list[int]]:
    """The samples of a shard's micro-batches: the first half, the others, and a filler."""
    indices = step.at(shard, 0)
    return [part for part in (indices[: len(indices) // 2], indices[len(indices) // 2 :]) if part] + [[]]


def micro_batch(step: Step, part: list[int]) -> MicroBatch:
    if not part:
        one = np.zeros(1, np.float32)
        zero = np.zeros(1, np.int64)
        return MicroBatch(zero, zero, np.array([0, 1], np.int32), one, one, one, np.array([FILLER_INDEX]))
    block = block_of(step, part)
    bounds = np.cumsum([0, *block.lengths]).astype(np.int32)
    return MicroBatch(
        block.tokens, block.labels, bounds, block.loss_mask, block.weights, block.rollout_logprobs, block.sample_index
    )


def shards_of(step: Step) -> list[Shard]:
    return [
        Shard((MiniBatch(tuple(micro_batch(step, part) for part in parts_of(step, shard))),))
        for shard in range(step.num_shards)
    ]


def column_of(step: Step, shard: int, said: list[FloatArray]) -> Column:
    filler = np.ones(1, np.float32)
    return [[end_to_end([said[index] for index in part]) if part else filler for part in parts_of(step, shard)]]


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1))
def test_one_collector_is_as_before(name: str, seed: int) -> None:
    recipe, step = CASES[name], random_step(seed, 1)
    roles = roles_of(recipe)
    found, metrics = learn(StepAdvantages(recipe), recipe, step, roles)
    given_ = {role: [column_of(step, shard, step.said[role]) for shard in range(step.num_shards)] for role in roles}
    before = Advantages(recipe)
    learnable = before.of_step(step.samples, shards_of(step), given_, step.greedy_rewards)
    assert set(metrics) == set(learnable.metrics)
    for key, value in learnable.metrics.items():
        # The KL was summed in float32, with the positions outside of the mask in between.
        assert metrics[key] == (pytest.approx(value, rel=1e-6, abs=1e-6) if key == "reward/kl" else value), key
    assert set(found) == set(learnable.columns)
    for column, shards in learnable.columns.items():
        for shard, minis in enumerate(shards):
            for part, values in zip(parts_of(step, shard), minis[0], strict=True):
                if part:
                    assert np.array_equal(end_to_end([found[column][index] for index in part]), values), column
