"""A step whose samples lie in several processes: the same shards and columns as if they lay in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.types import Block, Prompt, Sample, ShardPlan, Status
from megarl.data.blocks import laid, sample_block
from megarl.data.deal import Dealt, deal, deal_step
from megarl.data.pack import assemble, join_columns, merge_columns, merge_shards, pack, split_column
from tests.data.slow_pack import plain, slow_deal, slow_shards

OPTIONS: dict[str, Any] = {
    "num_shards": 2,
    "mini_batch_samples": 100,
    "micro_batch_tokens": 20,
    "reduction": "token-mean",
    "max_response_tokens": 12,
}


def make_sample(index: int, group: int, prompt: int, mask: Sequence[int], first: int = 1) -> Sample:
    """Tokens count up from `first`."""
    ids = np.arange(first, first + prompt + len(mask))
    return Sample(
        id=str(index),
        group_id=str(group),
        prompt=Prompt(str(group), ids[:prompt], "", ""),
        response_ids=ids[prompt:],
        response_text="",
        loss_mask=np.array(mask, np.uint8),
        rollout_logprobs=np.linspace(-3, -0.1, len(mask), dtype=np.float32),
        versions=(),
        status=Status.COMPLETED,
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Sample], list[int], int, dict[str, Any]]:
    """Samples, who owns each, how many owners there are, and how they are packed."""
    masks = draw(st.lists(st.lists(st.integers(0, 1), max_size=10), max_size=16))
    told = draw(st.sampled_from(["never", "always", "at times"]))
    samples, first = [], 1
    for index, mask in enumerate(masks):
        sample = make_sample(index, index // draw(st.integers(1, 3)), draw(st.integers(2, 6)), mask, first)
        first += sample.num_tokens
        if told == "always" or (told == "at times" and draw(st.booleans())):
            sample = replace(sample, routing=np.arange(3 * sample.num_tokens - 3, dtype=np.int16).reshape(-1, 3))
        samples.append(laid(sample) if draw(st.booleans()) else sample)
    num_owners = draw(st.integers(1, 4))
    owners = [draw(st.integers(0, num_owners - 1)) for _ in samples]
    options = {
        "num_shards": draw(st.integers(1, 4)),
        "mini_batch_samples": draw(st.integers(1, 17)),
        "micro_batch_tokens": draw(st.integers(16, 40)),
        "reduction": draw(st.sampled_from(["token-mean", "sequence-mean", "group-mean", "constant"])),
        "max_response_tokens": 12,
    }
    return samples, owners, num_owners, options


def dealt_to(samples: Sequence[Sample], owners: Sequence[int], num_owners: int, options: dict[str, Any]) -> Dealt:
    numbers = {group: number for number, group in enumerate(dict.fromkeys(sample.group_id for sample in samples))}
    return deal_step(
        np.array([sample.num_tokens for sample in samples], np.int64),
        np.array([sample.loss_mask.sum() for sample in samples], np.int64),
        np.array([numbers[sample.group_id] for sample in samples], np.int64),
        np.array(owners, np.int64),
        num_owners=num_owners,
        **options,
    )


def blocks_of(samples: Sequence[Sample], dealt: Dealt) -> list[list[Block]]:
    """[shard][owner], each made of its owner's samples alone."""
    return [
        [sample_block([samples[index] for index in part], part, dealt.weights[part]) for part in parts]
        for parts in zip(*dealt.parts, strict=True)
    ]


@settings(deadline=None)
@given(steps())
def test_shards_are_the_same_whoever_holds_the_samples(
    step: tuple[list[Sample], list[int], int, dict[str, Any]],
) -> None:
    samples, owners, num_owners, options = step
    dealt = dealt_to(samples, owners, num_owners, options)
    shards = [assemble(*each) for each in zip(dealt.plans, blocks_of(samples, dealt), strict=True)]
    found = [[[plain(micro) for micro in mini.micro_batches] for mini in shard.mini_batches] for shard in shards]
    assert found == slow_shards(samples, **options)
    for one, other in zip(shards, pack(samples, **options), strict=True):
        for mine, theirs in zip(one.mini_batches, other.mini_batches, strict=True):
            for micro, alone in zip(mine.micro_batches, theirs.micro_batches, strict=True):
                assert plain(micro) == plain(alone)
                for name, array in vars(alone).items():
                    assert getattr(getattr(micro, name), "dtype", None) == getattr(array, "dtype", None), name


@settings(deadline=None)
@given(steps())
def test_columns_go_to_the_owners_and_come_back(step: tuple[list[Sample], list[int], int, dict[str, Any]]) -> None:
    samples, owners, num_owners, options = step
    dealt = dealt_to(samples, owners, num_owners, options)
    blocks = blocks_of(samples, dealt)
    merged = merge_shards([assemble(*each) for each in zip(dealt.plans, blocks, strict=True)])
    # No two tokens of the step are the same, and a filler's is none of theirs.
    column = [[micro.tokens.astype(np.float32) for micro in mini.micro_batches] for mini in merged.mini_batches]
    parts = split_column(column, dealt.plans, blocks)
    for shard, mine in zip(parts, blocks, strict=True):
        for part, block in zip(shard, mine, strict=True):
            assert part.dtype == np.float32 and np.array_equal(
                part, np.concatenate([[], *(each.tokens for each in block.records)])
            )
    back = merge_columns([join_columns(*each) for each in zip(dealt.plans, blocks, parts, strict=True)])
    assert [[part.tolist() for part in mini] for mini in back] == [[part.tolist() for part in mini] for mini in column]
    # Several numbers a token go the same way.
    wide = [[np.stack([part, -part, 2 * part], axis=1) for part in mini] for mini in column]
    parts = split_column(wide, dealt.plans, blocks)
    assert not any(wide) or {part.shape[1:] for shard in parts for part in shard} == {(3,)}
    back = merge_columns([join_columns(*each) for each in zip(dealt.plans, blocks, parts, strict=True)])
    assert [[part.tolist() for part in mini] for mini in back] == [[part.tolist() for part in mini] for mini in wide]


@settings(deadline=None)
@given(
    st.integers(4, 40).flatmap(lambda most: st.tuples(st.just(most), st.lists(st.integers(1, most), max_size=40))),
    st.integers(1, 5),
)
def test_items_go_where_the_plain_rules_put_them(sizes: tuple[int, list[int]], num_shards: int) -> None:
    budget, lengths = sizes
    assert deal(lengths, num_shards, budget) == slow_deal(lengths, num_shards, budget)


def test_owners_give_their_samples_in_the_order_of_the_shard() -> None:
    # Of 8, 7, 6, 5 and 4 tokens: by hand 8, 5, 4 and 7, 6; then within 20 tokens 8, 5, 4 (17) and 7, 6.
    samples = [make_sample(index, index, 2, [1] * length) for index, length in enumerate((6, 5, 4, 3, 2))]
    dealt = dealt_to(samples, [1, 0, 1, 0, 1], 2, OPTIONS)
    first, second = dealt.plans
    assert (first.counts, second.counts) == (((3,),), ((2,),))
    assert (first.owners.tolist(), first.positions.tolist()) == ([1, 0, 1], [0, 0, 1])
    assert (second.owners.tolist(), second.positions.tolist()) == ([0, 1], [0, 0])
    assert [[part.tolist() for part in parts] for parts in dealt.parts] == [[[3], [1]], [[0, 4], [2]]]
    assert dealt.weights.tolist() == [np.float32(1 / 20)] * 5


def test_neighbours_stay_together_and_a_group_counts_over_all_owners() -> None:
    lengths, groups = np.array([9, 1, 2, 2, 1, 8]), np.array([7, 7, 3, 3, 7, 7])
    options = OPTIONS | {"micro_batch_tokens": 10, "reduction": "group-mean", "mini_batch_samples": 6}
    dealt = deal_step(lengths, lengths, groups, np.arange(6) % 2, num_owners=2, together=2, **options)
    assert [plan.counts for plan in dealt.plans] == [((2, 0),), ((2, 2),)]
    assert [[part.tolist() for part in parts] for parts in dealt.parts] == [[[0], [4, 2]], [[1], [5, 3]]]
    assert dealt.weights.tolist() == [np.float32(1 / (2 * tokens)) for tokens in (19, 19, 4, 4, 19, 19)]


def test_nothing_is_no_mini_batch() -> None:
    dealt = dealt_to([], [], 3, OPTIONS)
    assert [plan.counts for plan in dealt.plans] == [(), ()]
    assert [[len(part) for part in parts] for parts in dealt.parts] == [[0, 0]] * 3
    assert all(assemble(*each).mini_batches == () for each in zip(dealt.plans, blocks_of([], dealt), strict=True))


def test_what_does_not_fit_together_is_asserted() -> None:
    samples = [make_sample(index, index, 2, [1]) for index in range(2)]
    dealt = dealt_to(samples, [0, 1], 2, OPTIONS | {"num_shards": 1})
    [blocks], [plan] = blocks_of(samples, dealt), dealt.plans
    with pytest.raises(AssertionError, match=r"owners \[0 1\] of 1"):
        dealt_to(samples, [0, 1], 1, OPTIONS)
    with pytest.raises(AssertionError, match=r"\(\[1, 1\], 1\)"):
        assemble(ShardPlan(plan.counts, plan.owners[:1], plan.positions[:1]), blocks)
    with pytest.raises(AssertionError, match=r"\[2, 4\], \[3, 3\]"):
        join_columns(plan, blocks, [np.zeros(2, np.float32), np.zeros(4, np.float32)])
