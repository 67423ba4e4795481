"""Rewards of single turns, at the tokens that ended them: by hand, and through a collector's part of the advantages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.core.types import Sample, VersionSpan
from megarl.data.blocks import laid, sample_block
from megarl.rollout.batcher import Part
from megarl.rollout.collector import blocks_of
from megarl.rollout.local_advantages import LocalAdvantages, SampleNumbers, Settled
from megarl.rollout.sequences import Sequences
from megarl.rollout.turns import TURN_ENDS, TURN_REWARDS, by_turn, moved_to_turns, turns_of
from tests.rollout.samples import make_prompt, make_sample
from tests.rollout.test_collector import make_recipe

# Three turns of two tokens each, with one, and two, of the environment between them, behind a prompt of three.
MASK = [1, 1, 0, 1, 1, 0, 0, 1, 1]
ENDS, REWARDS = [2, 5, 9], [0.5, 0.0, 2.0]


def episode(mask: list[int] = MASK, rewards: list[float] = REWARDS) -> Sample:
    return laid(
        replace(
            make_sample("1/p0", sum(rewards)),
            prompt=replace(make_prompt("p0"), token_ids=np.arange(3, dtype=np.int32)),
            response_ids=np.arange(9, dtype=np.int32),
            loss_mask=np.array(mask, np.uint8),
            rollout_logprobs=np.zeros(9, np.float32),
            metadata={TURN_ENDS: ENDS, TURN_REWARDS: rewards},
        )
    )


def moved(*samples: Sample) -> np.ndarray:
    block = sample_block(samples, np.arange(len(samples)), np.ones(len(samples)), tuple(map(turns_of, samples)))
    return moved_to_turns(Sequences([block]), [block])


def test_rewards_move_from_the_end_to_their_turns() -> None:
    """Labels stand one before their tokens: the response begins at 2, its turns end at 3, 6 and 10 of 12."""
    assert turns_of(episode()).tolist() == [[3, 0.5], [6, 0.0], [10, 2.0]]
    assert moved(episode()).tolist() == [0, 0, 0, 0.5, 0, 0, 0, 0, 0, 0, -0.5, 0]
    assert moved(make_sample("1/p1", 1.0), episode())[-12:].tolist() == moved(episode()).tolist()


def test_a_turn_that_is_not_trained_on_leaves_its_reward_to_the_one_before() -> None:
    second = [1, 1, 0, 0, 0, 0, 0, 1, 1]
    assert moved(episode(second, [0.0, 0.5, 2.0])).tolist() == [0, 0, 0, 0.5, 0, 0, 0, 0, 0, 0, -0.5, 0]
    assert not moved(episode([0] * 9)).any()


def test_turns_are_not_praised_for_what_one_earned_that_is_too_old() -> None:
    """Nothing of the first turn is trained on: its reward comes off the episode's, and goes to no later turn."""
    first = [0, 0, 0, 1, 1, 0, 0, 1, 1]
    assert moved(episode(first)).tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, -0.5, 0]


def test_a_turn_that_a_budget_ended_has_none() -> None:
    assert turns_of(episode(rewards=[0.5, 1.0])).tolist() == [[3, 0.5], [6, 1.0]]


def test_turns_keep_their_numbers_where_earlier_ones_are_too_old(tmp_path: Path) -> None:
    """Weights 0 wrote the first turn of one episode, weights 1 the rest and the other: without the oldest, like with like."""
    recipe = make_recipe(tmp_path, algorithm={"advantage": "grpo_turns", "normalize_std": False})
    old, new = (
        replace(sample, versions=(VersionSpan(first, 0, 3), VersionSpan(1, 3, 9)))
        for sample, first in ((episode(), 0), (episode(), 1))
    )
    numbers = np.arange(2)
    part = Part(1, (0,), ((0, 0), (0, 1)), numbers, (numbers,), np.ones(2, np.float32), oldest=1)
    blocks = blocks_of(part, [old, new])
    assert blocks[0].first_turns == (1, 0)
    assert blocks_of(replace(part, oldest=0), [old, new])[0].first_turns is None
    facts = SampleNumbers(
        np.array([1.0, 0.0], np.float32),
        *(np.zeros(2, np.int64),) * 2,
        *(np.zeros(2, np.float32), np.zeros(2, np.bool_), np.zeros((2, 0)), 0.0, np.zeros(2, np.float32)),
    )
    local = LocalAdvantages(recipe)
    local.measure(facts, blocks, {"old_logprobs": [np.zeros(24, np.float32)]})
    [advantages] = local.finish(Settled()).columns["advantages"]
    second, third = 5, 9  # where the turns of the first episode that are left begin
    assert [advantages[at] for at in (second, third)] == [0.5, 0.5]
    assert [advantages[12 + at] for at in (2, second, third)] == [0, -0.5, -0.5]


@pytest.mark.parametrize(("credit", "wanted"), [("episode", [2.5, 2.5, 2.5]), ("turn", [2.5, 2.0, 2.0])])
def test_what_a_turn_leads_to_is_what_comes_after_it(tmp_path: Path, credit: str, wanted: list[float]) -> None:
    """Undiscounted returns by turn: an earlier turn's reward is not in a later one's."""
    recipe = make_recipe(
        tmp_path,
        agent={"environment": "guess_number", "credit": credit},
        algorithm={"advantage": "tests.rollout.test_turns:returns", "kl_coef": 0.0},
    )
    sample = episode()
    turns = (turns_of(sample),) if by_turn(recipe) else None
    block = sample_block([sample], np.arange(1), np.ones(1), turns)
    numbers = SampleNumbers(
        np.array([2.5], np.float32),
        *(np.zeros(1, np.int64),) * 2,
        *(np.zeros(1, np.float32), np.zeros(1, np.bool_), np.zeros((1, 0)), 0.0, np.zeros(1, np.float32)),
    )
    local = LocalAdvantages(recipe)
    measured = local.measure(numbers, [block], {"old_logprobs": [np.zeros(12, np.float32)]})
    assert measured.trained_tokens == 6
    [advantages] = local.finish(Settled()).columns["advantages"]
    assert [advantages[at] for at in (3, 6, 10)] == wanted


def returns(token_rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Of one sequence: the sum of what comes from here on."""
    return np.cumsum(token_rewards[::-1])[::-1] * mask
