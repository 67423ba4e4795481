"""What a step is made of, and its numbers, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.support.rollout_simulation import make_recipe
from megarl.core.errors import MegarlError
from megarl.core.types import ShardPlan, VersionSpan
from megarl.models.flops import train_flops
from megarl.recipe.algorithm import KeepGroups
from megarl.rollout import batcher
from megarl.rollout.facts import GroupFacts
from megarl.rollout.ledger import Entry
from megarl.rollout.local_advantages import Measured, numbers_of
from megarl.rollout.producer import Pace
from megarl.rollout.sample_facts import group_facts
from megarl.rollout.step_advantages import StepAdvantages, StepFacts
from megarl.rollout.step_metrics import batch_info, sample_metrics, version_metrics
from megarl.rollout.step_plan import StepPlanner
from tests.models.configs import PLAIN
from tests.rollout.samples import make_sample
from tests.rollout.test_ledger import admitted


def group(number: int, rewards: list[float], lengths: list[int], version: int = 5, **changes: object) -> GroupFacts:
    count = len(rewards)
    none = np.zeros(count, np.bool_)
    made = GroupFacts(
        group=number,
        prompt_tokens=np.full(len(lengths), 10 + number),
        response_tokens=np.array(lengths),
        trained_tokens=np.array(lengths),
        rewards=np.array(rewards, np.float32),
        mean_nll=np.ones(count, np.float32),
        usable=~none,
        truncated=none,
        failed=none,
        ungraded=none,
        spans=tuple((VersionSpan(version, 0, length),) for length in lengths),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def entry(facts: GroupFacts, owner: int = 0) -> Entry:
    return Entry(admitted(facts.group, owner=owner), "taken", facts)


# Group 1 lost a sample, group 2 teaches nothing, and group 4 has one sample too old and one that is so in part.
MIXED = group(
    4,
    [0, 1],
    [6, 4],
    spans=((VersionSpan(3, 0, 6),), (VersionSpan(3, 0, 1), VersionSpan(4, 1, 3), VersionSpan(5, 3, 4))),
    truncated=np.array([False, True]),
)
FAILED, CUT_OFF = np.array([True, False, False]), np.array([False, False, True])
ENTRIES = [
    entry(
        group(1, [0, 1, 0], [0, 2, 3], usable=~FAILED, failed=FAILED, failure="no answer", truncated=CUT_OFF), owner=1
    ),
    entry(group(2, [1, 1], [4, 5])),
    entry(MIXED),
]


def test_a_step_has_usable_samples_that_are_not_too_old() -> None:
    samples = batcher.select(ENTRIES, 7, 4, greedy=False, drop_dull=False)
    assert samples.taken == (1, 2, 4)
    assert samples.numbers.tolist() == [1, 1, 2, 2, 4]
    assert samples.positions.tolist() == [1, 2, 0, 1, 1]
    assert samples.group_index.tolist() == [0, 0, 1, 1, 2]
    assert samples.owners.tolist() == [1, 1, 0, 0, 0]
    assert samples.num_tokens.tolist() == [13, 14, 16, 17, 18]
    assert samples.trained_tokens.tolist() == [2, 3, 4, 5, 3]
    assert samples.rewards.tolist() == [1, 0, 1, 1, 1]
    assert samples.reward_parts.shape == (5, 0)
    assert samples.truncated.tolist() == [False, True, False, False, True]


def test_a_greedy_answer_that_is_too_long_is_penalised_as_the_samples_are_that_it_is_compared_with() -> None:
    buffer = {"advantage": "remax", "policy_loss": "reinforce", "overlong_buffer": 0.5}
    recipe = make_recipe(prompts=1, samples=2, steps=1, longest=10, algorithm=buffer, actor={"micro_batch_tokens": 64})
    maker = StepAdvantages(recipe)
    planner = StepPlanner(recipe, PLAIN, Pace.of(recipe, beside=False), maker, 1, 1)
    facts = group(1, [1, 0], [10, 5], greedy_reward=1.0, greedy_tokens=10)
    samples, _ = planner.plan([entry(facts)], 1, 5, [], {})
    measured = Measured(np.arange(2), 15, 0.0, token_rewards=np.zeros(2, np.float32))
    [settled] = maker.settle(StepFacts.of(samples), [measured])
    assert settled.advantages is not None and settled.advantages.tolist() == [0, 0], "1 - 1, 0, and 1 - 1 of the greedy"
    greedy = replace(make_sample("1/p0"), response_ids=np.arange(7))
    assert group_facts(1, [make_sample("1/p0")], [greedy]).greedy_tokens == 7


def test_a_steps_metrics_are_the_same_whoever_finished_first() -> None:
    """Of rewards whose sums depend on their order, those of groups that were replaced among them."""
    recipe = make_recipe(prompts=1, samples=2, steps=1, longest=10, actor={"micro_batch_tokens": 64})
    planner = StepPlanner(recipe, PLAIN, Pace.of(recipe, beside=False), StepAdvantages(recipe), 1, 1)
    dull = [group(number, [reward] * 2, [3, 3]) for number, reward in enumerate((0.1, 0.7, 1e7, 0.3))]
    taken = entry(group(4, [0.25, 1.1], [10, 5]))
    told = [planner.plan([taken], 1, 5, order, {})[1].info.metrics for order in (dull, dull[::-1], dull[2:] + dull[:2])]
    assert told[0] == told[1] == told[2]


def test_flops_are_of_the_sequences_that_samples_consist_of() -> None:
    """A query meets no key of another sequence of its sample."""
    one = replace(make_sample("1/p0"), versions=(VersionSpan(5, 0, 2),))
    several = replace(
        one,
        response_ids=np.arange(10),
        loss_mask=np.ones(10, np.uint8),
        rollout_logprobs=np.zeros(10, np.float32),
        versions=(VersionSpan(5, 0, 10),),
        starts=(3, 7),
    )
    entries = [entry(group_facts(1, [one, several], [])), entry(group_facts(2, [one], []))]
    samples = batcher.select(entries, 7, 5, greedy=False, drop_dull=False)
    assert samples.sequence_tokens.tolist() == [5, 6, 4, 3, 5]
    plan = ShardPlan(((3,),), np.zeros(3, np.int64), np.arange(3))
    recipe = make_recipe(prompts=2, samples=2, steps=1, longest=10)
    info = batch_info(samples, recipe, PLAIN, [plan], 5, {}, "")
    assert info.num_tokens == 5 + 13 + 5
    assert info.metrics["perf/train_flops"] == train_flops(PLAIN, [5, 6, 4, 3, 5])


def test_groups_that_teach_nothing_are_left_out_where_others_do() -> None:
    samples = batcher.select(ENTRIES, 7, 4, greedy=False, drop_dull=True)
    # Of group 4 one sample is left, which is compared with nobody.
    assert (samples.numbers.tolist(), samples.num_groups) == ([1, 1], 1)
    assert batcher.select(ENTRIES[1:2], 7, 4, greedy=False, drop_dull=True).numbers.tolist() == [2, 2]


RIGHT = {
    "right": np.array([1.0, 1.0, 1.0, 0.0]),
    "style": np.array([0.5, 0.5, 0.5, 0.5]),
    "some": np.array([np.nan, 1.0, np.nan, 0.0]),
    "none": np.full(4, np.nan),
}
LAST = np.array([True, True, True, False])


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (None, True),
        (KeepGroups(), True),
        (KeepGroups(above=0.5), False),  # of the reward, whose mean is 0.25
        (KeepGroups(below=0.5), True),
        (KeepGroups(grader="right"), True),
        (KeepGroups(grader="right", above=0.1, below=0.8), True),
        (KeepGroups(grader="right", above=0.1, below=0.75), False),  # the mean is the bound
        (KeepGroups(grader="right", above=0.75), False),
        (KeepGroups(grader="style", above=0.1), False),  # all equal
        (KeepGroups(grader="some", above=0.4, below=0.6), True),
        (KeepGroups(grader="none"), False),
        (KeepGroups(grader="nobody"), False),  # as where every sample has failed
    ],
)
def test_a_group_is_kept_by_the_figure_that_the_recipe_names(keep: KeepGroups | None, kept: bool) -> None:
    facts = group(1, [0, 1, 0, 0], [1] * 4, parts=RIGHT)
    assert batcher.is_kept(facts, keep) == kept
    samples = batcher.select(
        [entry(facts), entry(group(2, [1, 1, 1, 1], [1] * 4, parts={name: each / 2 for name, each in RIGHT.items()}))],
        7,
        4,
        greedy=False,
        drop_dull=True,
        keep=keep,
    )
    assert (1 in samples.numbers) == kept or set(samples.numbers) == {1, 2}, "a step needs samples"
    if keep is not None and keep.grader is not None:  # where only those that are right can be used, none is wrong
        assert not batcher.is_kept(replace(facts, usable=LAST), keep)


def test_a_step_has_the_scores_of_the_graders_that_are_named() -> None:
    """Of rows of several kinds: one grader says nothing of the second group."""
    other = group(2, [1, 0], [1, 1], parts={"right": np.array([0.25, 0.75])}, usable=np.array([False, True]))
    entries = [entry(group(1, [0, 1, 0, 0], [1] * 4, parts=RIGHT)), entry(other)]
    samples = batcher.select(entries, 7, 4, greedy=False, drop_dull=False, names=["style", "right"])
    expected = [[0.5, 1], [0.5, 1], [0.5, 1], [0.5, 0], [np.nan, 0.75]]
    assert np.array_equal(samples.reward_parts, expected, equal_nan=True)
    [first, second] = numbers_of(replace(samples, owners=np.array([1, 1, 1, 1, 0])), 2, 0.0)
    assert np.array_equal(first.reward_parts, expected[4:], equal_nan=True) and second.reward_parts.shape == (4, 2)


def test_every_sample_is_in_one_block_of_its_collector() -> None:
    samples = batcher.select(ENTRIES, 7, 4, greedy=False, drop_dull=False)
    recipe = make_recipe(prompts=3, samples=2, steps=1, longest=32, algorithm={"reduction": "sequence-mean"})
    plans, parts = batcher.assign(samples, recipe, num_owners=2, num_shards=2, oldest=4, groups=ENTRIES)
    assert [part.groups for part in parts] == [(2, 4), (1,)]
    assert [part.samples for part in parts] == [((2, 0), (2, 1), (4, 1)), ((1, 1), (1, 2))]
    assert [part.indices.tolist() for part in parts] == [[2, 3, 4], [0, 1]]
    assert sorted(np.concatenate([block for part in parts for block in part.blocks]).tolist()) == [0, 1, 2, 3, 4]
    assert sum(len(plan.positions) for plan in plans) == 5
    # The mean over five samples of the mean over their trained tokens.
    weights = np.concatenate([parts[1].weights, parts[0].weights])
    assert weights == pytest.approx([1 / (5 * tokens) for tokens in (2, 3, 4, 5, 3)])


def test_tokens_of_weights_that_are_not_there_yet_are_refused() -> None:
    batcher.check_versions(ENTRIES, 5, 2)
    with pytest.raises(MegarlError, match=r"tokens 0 to 2 were generated by weight version 5; .* version 4"):
        batcher.check_versions(ENTRIES, 4, 2)
    with pytest.raises(MegarlError, match="Sample 0 of group 4: tokens 0 to 6 were generated by weight version 3"):
        batcher.check_versions(ENTRIES, 5, 0)


def test_the_numbers_of_a_step() -> None:
    seen = [each.facts for each in ENTRIES if each.facts is not None]
    found = sample_metrics(seen, greedy=False)
    assert found["reward/mean"] == pytest.approx(4 / 6)
    assert found["reward/std"] == pytest.approx((4 / 6 * 2 / 6) ** 0.5)
    assert found["rollout/prompt_len_mean"] == pytest.approx((2 * 11 + 2 * 12 + 2 * 14) / 6)
    assert found["rollout/response_len_mean"] == pytest.approx((2 + 3 + 4 + 5 + 6 + 4) / 6)
    assert (found["rollout/response_len_max"], found["rollout/failed"]) == (6, 1)
    assert found["rollout/truncated"] == 2 / 7
    assert found["rollout/zero_variance_groups"] == pytest.approx(1 / 3)


def test_how_far_behind_a_step_is() -> None:
    taken = [group(1, [0, 1], [2, 3]), MIXED]
    # Two samples of now; one with tokens of 4 and 5; the one of version 3 is too old.
    assert version_metrics(taken, 5, 4) == pytest.approx(
        {
            "rollout/staleness_mean": 1 / 3,
            "rollout/staleness_max": 1,
            "rollout/staleness/0": 2 / 3,
            "rollout/staleness/1": 1 / 3,
            "rollout/versions_per_sample": 4 / 3,
            "rollout/carried_tokens": 2 / (2 + 3 + 3),
            "rollout/stale_samples": 1,
        }
    )
    assert version_metrics([replace(MIXED, usable=np.zeros(2, np.bool_))], 5, 4) == {"rollout/stale_samples": 0}
