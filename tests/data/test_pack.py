from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.reduce import Reduction
from megarl.core.types import UNKNOWN_EXPERT, Block, Image, MicroBatch, Prompt, Sample, Shard, ShardPlan, Status
from megarl.data.pack import (
    FILLER_INDEX,
    assemble,
    column_like,
    merge_columns,
    merge_shards,
    pack,
)
from megarl.data.pack_rows import pack_pairs, pack_sft, pack_unpaired
from megarl.data.pairs import Pair
from megarl.data.sft import Demonstration
from megarl.data.unpaired import Unpaired


def make_sample(name: str, prompt: Sequence[int], response: Sequence[int], mask: Sequence[int] | None = None) -> Sample:
    count = len(response)
    return Sample(
        id=name,
        group_id=name,
        prompt=Prompt(name, np.array(prompt, np.int64), "", ""),
        response_ids=np.array(response, np.int64),
        response_text="",
        loss_mask=np.array([1] * count if mask is None else mask, np.uint8),
        rollout_logprobs=-np.arange(1, count + 1, dtype=np.float32),
        versions=(),
        status=Status.COMPLETED,
    )


def micro_batches(shard: Shard) -> list[MicroBatch]:
    return [micro for mini in shard.mini_batches for micro in mini.micro_batches]


def whole(packed: Sequence[tuple[ShardPlan, Block]]) -> list[Shard]:
    return [assemble(plan, [block]) for plan, block in packed]


def options(**changed: Any) -> dict[str, Any]:
    usual = {
        "num_shards": 1,
        "mini_batch_samples": 100,
        "micro_batch_tokens": 64,
        "reduction": "token-mean",
        "max_response_tokens": 16,
    }
    return usual | changed


def test_columns_speak_of_the_next_token() -> None:
    samples = [make_sample("a", [10, 11, 12], [20, 21]), make_sample("b", [13], [22, 23, 24], [1, 0, 1])]
    (shard,) = pack(samples, **options())
    (micro,) = micro_batches(shard)
    assert micro.tokens.tolist() == [10, 11, 12, 20, 21, 13, 22, 23, 24]
    assert micro.labels.tolist() == [11, 12, 20, 21, 0, 22, 23, 24, 0]
    assert micro.cu_seqlens.tolist() == [0, 5, 9]
    assert micro.loss_mask.tolist() == [0, 0, 1, 1, 0, 1, 0, 1, 0]
    assert micro.rollout_logprobs.tolist() == [0, 0, -1, -2, 0, -1, 0, -3, 0]
    assert micro.weights.tolist() == [0, 0, 0.25, 0.25, 0, 0.25, 0, 0.25, 0]
    assert micro.sample_index.tolist() == [0, 1]
    assert column_like(shard, [2.0, -3.0])[0][0].tolist() == [0, 0, 2, 2, 0, -3, 0, -3, 0]


def test_a_sample_of_several_sequences_has_them_apart_and_weighs_as_one() -> None:
    """[10 11 20 | 12 21 22], the second of which begins at position 1 of the response; and another sample."""
    split = replace(make_sample("a", [10, 11], [20, 12, 21, 22], [1, 0, 1, 1]), starts=(1,))
    split.routing = np.array([[1], [2], [UNKNOWN_EXPERT], [4], [5]], np.int16)
    other = make_sample("b", [13], [23, 24])
    other.routing = np.array([[6], [7]], np.int16)
    (shard,) = pack([split, other], **options(reduction="sequence-mean"))
    (micro,) = micro_batches(shard)
    assert micro.tokens.tolist() == [10, 11, 20, 12, 21, 22, 13, 23, 24]
    assert micro.labels.tolist() == [11, 20, 0, 21, 22, 0, 23, 24, 0]
    assert micro.cu_seqlens.tolist() == [0, 3, 6, 9] and micro.sample_index.tolist() == [0, 0, 1]
    assert micro.loss_mask.tolist() == [0, 1, 0, 1, 1, 0, 1, 1, 0]
    assert micro.rollout_logprobs.tolist() == [0, -1, 0, -3, -4, 0, -1, -2, 0]
    assert np.allclose(micro.weights, np.array([0, 1, 0, 1, 1, 0, 1.5, 1.5, 0]) / 6), (
        "half of the loss is each sample's"
    )
    assert micro.routing is not None and micro.routing[:, 0].tolist() == [1, 2, -1, 4, 5, -1, 6, 7, -1]
    assert column_like(shard, [2.0, -3.0])[0][0].tolist() == [0, 2, 0, 2, 2, 0, -3, -3, 0]
    with pytest.raises(AssertionError, match="predicted by the one before it"):
        micro_batches(pack([replace(split, starts=(2,))], **options())[0])


def test_an_array_of_a_micro_batch_has_the_declared_type() -> None:
    sample = make_sample("a", [1], [2])
    sample.routing = np.zeros((1, 4), np.int16)
    (shard,) = pack([sample], **options())
    (micro,) = micro_batches(shard)
    assert micro.margins is None and micro.desirable is None, "samples are neither pairs nor labelled"
    assert micro.images is None, "no sample has images"
    [of_pairs] = micro_batches(whole(pack_pairs([make_pair(3, 2)], **pairs_options()))[0])
    labelled = [make_labelled(1, desirable=True)]
    [of_labelled] = micro_batches(whole(pack_unpaired(labelled, num_shards=1, micro_batch_tokens=64))[0])
    micro = replace(micro, margins=of_pairs.margins, desirable=of_labelled.desirable)
    arrays = [name for name in MicroBatch.__dataclass_fields__ if name != "images"]
    types = {name: str(getattr(micro, name).dtype) for name in arrays}
    assert types == {
        "tokens": "int64",
        "labels": "int64",
        "cu_seqlens": "int32",
        "loss_mask": "float32",
        "weights": "float32",
        "rollout_logprobs": "float32",
        "sample_index": "int64",
        "routing": "int16",
        "margins": "float32",
        "desirable": "float32",
    }


def test_the_rollouts_routing_travels_with_its_tokens() -> None:
    samples = [make_sample("a", [10, 11], [12]), make_sample("b", [13], [14])]
    samples[0].routing = np.array([[1, 2], [3, 4]], np.int16)
    samples[1].routing = np.array([[5, 6]], np.int16)
    (micro,) = micro_batches(pack(samples, **options())[0])
    assert micro.routing is not None
    assert micro.routing.tolist() == [[1, 2], [3, 4], [UNKNOWN_EXPERT] * 2, [5, 6], [UNKNOWN_EXPERT] * 2]
    samples[1].routing = None  # what is known of its neighbour stays known
    (micro,) = micro_batches(pack(samples, **options())[0])
    assert micro.routing is not None and micro.routing.tolist() == [[1, 2], [3, 4], *[[UNKNOWN_EXPERT] * 2] * 3]
    samples[0].routing = None
    (micro,) = micro_batches(pack(samples, **options())[0])
    assert micro.routing is None


def test_samples_without_a_response_weigh_nothing_and_break_nothing() -> None:
    (shard,) = pack([make_sample("a", [1], []), make_sample("b", [1, 2], []), make_sample("c", [3], [4])], **options())
    (micro,) = micro_batches(shard)
    assert micro.cu_seqlens.tolist() == [0, 1, 3, 5]
    assert micro.weights.tolist() == [0, 0, 0, 1, 0]


def test_mini_batches_follow_the_given_order_and_the_last_may_be_smaller() -> None:
    samples = [make_sample(str(index), [index], [1] * (index + 1)) for index in range(5)]
    shards = pack(samples, **options(num_shards=2, mini_batch_samples=2))
    minis = [
        sorted(
            index
            for shard in shards
            for micro in shard.mini_batches[mini].micro_batches
            for index in micro.sample_index
        )
        for mini in range(3)
    ]
    assert minis == [[0, 1], [2, 3], [FILLER_INDEX, 4]]


def test_longest_samples_go_to_the_lightest_shard() -> None:
    samples = [make_sample(str(length), [0], [1] * (length - 1)) for length in (8, 7, 6, 5, 4)]
    shards = pack(samples, **options(num_shards=2))
    # By hand: 8 | 7, then 6 beside 7 (13), 5 beside 8 (13), 4 to the first of the equals.
    assert [sorted(micro_batches(shard)[0].sample_index.tolist()) for shard in shards] == [[0, 3, 4], [1, 2]]


def test_micro_batches_of_a_shard_are_even() -> None:
    samples = [make_sample(str(index), [0], [1] * 9) for index in range(6)]
    (shard,) = pack(samples, **options(micro_batch_tokens=40))
    # First fit alone would leave 40 and 20.
    assert [micro.num_tokens for micro in micro_batches(shard)] == [30, 30]


def test_a_shard_without_samples_gets_a_filler_for_every_micro_batch() -> None:
    (full, empty) = pack([make_sample("a", [0], [1] * 9)], **options(num_shards=2))
    (filler,) = micro_batches(empty)
    assert filler.num_tokens == 1
    assert filler.cu_seqlens.tolist() == [0, 1]
    assert filler.loss_mask.sum() == filler.weights.sum() == 0
    assert filler.sample_index.tolist() == [FILLER_INDEX]
    assert column_like(empty, [float("nan")])[0][0].tolist() == [0]
    assert len(micro_batches(full)) == 1


def test_a_nan_outside_the_mask_stays_outside() -> None:
    (shard,) = pack([make_sample("a", [0], []), make_sample("b", [0], [1])], **options())
    assert column_like(shard, [float("nan"), 5.0])[0][0].tolist() == [0, 5, 0]


def test_what_the_recipe_check_excludes_is_asserted() -> None:
    with pytest.raises(AssertionError, match="11 tokens that stay together, over micro_batch_tokens=10"):
        pack([make_sample("a", [0], [1] * 10)], **options(micro_batch_tokens=10))
    with pytest.raises(AssertionError, match="sample a has an empty prompt"):
        pack([make_sample("a", [], [1])], **options())
    with pytest.raises(AssertionError, match="2 response tokens, 1 mask entries"):
        pack([make_sample("a", [0], [1, 2], [1])], **options())


def test_no_samples_are_no_mini_batches() -> None:
    assert pack([], **options(num_shards=2)) == [Shard(()), Shard(())]


def test_demonstrations_train_the_mean_over_their_tokens() -> None:
    first = Demonstration("a", np.array([5, 6, 7]), np.array([0, 1, 1], np.uint8))
    second = Demonstration("b", np.array([8, 9]), np.array([0, 1], np.uint8))
    (shard,) = whole(pack_sft([first, second], num_shards=1, micro_batch_tokens=8))
    (micro,) = micro_batches(shard)
    assert micro.labels.tolist() == [6, 7, 0, 9, 0]
    np.testing.assert_allclose(micro.weights, np.array([1, 1, 0, 1, 0]) / 3, rtol=1e-6)
    assert micro.rollout_logprobs.tolist() == [0] * 5 and micro.images is None


def test_demonstrations_have_their_images_beside_them_wherever_they_are_dealt_to() -> None:
    images = {name: Image(name.encode(), 8, 4) for name in "abC"} | {"d": Image(Path("d.png"), 8, 4, "line 4")}
    rows = [
        Demonstration(names, np.full(size, size, np.int32), np.ones(size, np.uint8), tuple(map(images.get, names)))
        for size, names in ((3, "a"), (4, ""), (5, "bC"), (6, "d"))
    ]
    shards = whole(pack_sft(rows, num_shards=2, micro_batch_tokens=8))
    found: dict[int, Any] = {}
    for micro in (micro for shard in shards for micro in micro_batches(shard)):
        sizes = np.diff(micro.cu_seqlens).tolist()
        found |= dict(zip(sizes, micro.images or [()] * len(sizes), strict=True))
    there = replace(images["d"], source=Path.cwd() / "d.png")  # other processes are in other folders
    assert found == {3: (images["a"],), 4: (), 5: (images["b"], images["C"]), 6: (there,)}
    assert found[6][0].where == "line 4"


@st.composite
def sample_lists(draw: st.DrawFn) -> list[Sample]:
    sizes = draw(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 12)), min_size=1, max_size=24))
    samples = []
    token = 1
    for index, (prompt, response) in enumerate(sizes):
        mask = draw(st.lists(st.integers(0, 1), min_size=response, max_size=response))
        ids = list(range(token, token + prompt + response))  # every token of the step is another number
        token += prompt + response
        samples.append(make_sample(str(index), ids[:prompt], ids[prompt:], mask))
    return samples


REDUCTIONS = st.sampled_from(["token-mean", "sequence-mean", "group-mean", "constant"])


@settings(deadline=None)
@given(
    samples=sample_lists(),
    num_shards=st.integers(1, 4),
    mini_batch_samples=st.integers(1, 25),
    budget=st.integers(20, 60),
    reduction=REDUCTIONS,
)
def test_every_token_once_within_the_budget_with_equal_counts(
    samples: list[Sample], num_shards: int, mini_batch_samples: int, budget: int, reduction: Reduction
) -> None:
    shards = pack(
        samples,
        **options(
            num_shards=num_shards, mini_batch_samples=mini_batch_samples, micro_batch_tokens=budget, reduction=reduction
        ),
    )
    seen = []
    for shard in shards:
        for micro in micro_batches(shard):
            assert micro.num_tokens <= budget
            for which, (index, start) in enumerate(zip(micro.sample_index, micro.cu_seqlens[:-1], strict=True)):
                if index != FILLER_INDEX:
                    tokens = micro.tokens[start : micro.cu_seqlens[which + 1]].tolist()
                    assert tokens == [*samples[index].prompt.token_ids, *samples[index].response_ids]
                    seen.append(int(index))
    assert sorted(seen) == list(range(len(samples)))
    counts = {tuple(len(mini.micro_batches) for mini in shard.mini_batches) for shard in shards}
    assert len(counts) == 1
    assert len(counts.pop()) == -(-len(samples) // mini_batch_samples)


def total_by_token(shards: Sequence[Shard]) -> dict[tuple[int, int], float]:
    """Weight of each (mini-batch, predicted token): what the loss sees, whatever the layout."""
    return {
        (mini_index, int(label)): float(weight)
        for shard in shards
        for mini_index, mini in enumerate(shard.mini_batches)
        for micro in mini.micro_batches
        for label, weight, mask in zip(micro.labels, micro.weights, micro.loss_mask, strict=True)
        if mask
    }


@settings(deadline=None)
@given(samples=sample_lists(), num_shards=st.integers(2, 4), budget=st.integers(20, 60), reduction=REDUCTIONS)
def test_weights_depend_neither_on_the_shards_nor_on_the_budget(
    samples: list[Sample], num_shards: int, budget: int, reduction: Reduction
) -> None:
    one = pack(samples, **options(mini_batch_samples=5, micro_batch_tokens=10_000, reduction=reduction))
    many = pack(
        samples,
        **options(num_shards=num_shards, mini_batch_samples=5, micro_batch_tokens=budget, reduction=reduction),
    )
    assert total_by_token(one) == total_by_token(many)


@settings(deadline=None)
@given(samples=sample_lists(), reduction=REDUCTIONS)
def test_weights_sum_as_the_reduction_says(samples: list[Sample], reduction: Reduction) -> None:
    shards = pack(samples, **options(num_shards=2, reduction=reduction))
    total = sum(float(micro.weights.sum()) for shard in shards for micro in micro_batches(shard))
    trained = sum(int(sample.loss_mask.sum()) for sample in samples)
    wanted = trained / (len(samples) * 16) if reduction == "constant" else float(trained > 0)
    assert total == pytest.approx(wanted, rel=1e-5)


@settings(deadline=None)
@given(samples=sample_lists(), num_shards=st.integers(1, 3))
def test_packing_is_deterministic(samples: list[Sample], num_shards: int) -> None:
    first, second = (
        [[micro.sample_index.tolist() for micro in micro_batches(shard)] for shard in pack(samples, **keys)]
        for keys in [options(num_shards=num_shards, micro_batch_tokens=24)] * 2
    )
    assert first == second


@given(sample_lists(), st.sampled_from([2, 4]))
def test_merged_shards_hold_the_micro_batches_of_all(samples: list[Sample], num_shards: int) -> None:
    packed = pack(samples, **options(num_shards=num_shards))
    merged = merge_shards(packed)
    columns = [[[micro.weights for micro in mini.micro_batches] for mini in shard.mini_batches] for shard in packed]
    together = merge_columns(columns)
    assert merged.num_tokens == sum(shard.num_tokens for shard in packed)
    for mini, parts in zip(merged.mini_batches, together, strict=True):
        for micro, part in zip(mini.micro_batches, parts, strict=True):
            assert np.array_equal(micro.weights, part)


def make_pair(chosen: int, rejected: int, margin: float = 0.0) -> Pair:
    """Two answers of so many tokens to a prompt of two; the tokens count up from 10 and from 20."""

    def side(first: int, length: int) -> Demonstration:
        tokens = np.concatenate([[1, 2], np.arange(first, first + length)]).astype(np.int64)
        return Demonstration("row", tokens, np.array([0, 0] + [1] * length, np.uint8))

    return Pair(side(10, chosen), side(20, rejected), margin)


def pairs_options(**changed: Any) -> dict[str, Any]:
    return {"num_shards": 1, "micro_batch_tokens": 64, "scored": False} | changed


def test_a_pairs_responses_are_marked_and_weigh_one_over_the_pairs_together() -> None:
    (shard,) = whole(pack_pairs([make_pair(2, 1, 0.5), make_pair(1, 4)], **pairs_options()))
    (micro,) = micro_batches(shard)
    assert micro.tokens.tolist() == [1, 2, 10, 11, 1, 2, 20, 1, 2, 10, 1, 2, 20, 21, 22, 23]
    assert micro.cu_seqlens.tolist() == [0, 4, 7, 10, 16]
    assert micro.loss_mask.tolist() == [0, 1, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 1, 1, 1, 0]
    # Each of 4 sequences counts 1/4, assigned to its labels: a pair 1/2.
    assert micro.weights.tolist() == [0, 1 / 8, 1 / 8, 0, 0, 1 / 4, 0, 0, 1 / 4, 0, 0, *[1 / 16] * 4, 0]
    assert micro.sample_index.tolist() == [0, 1, 2, 3]
    assert micro.margins is not None and micro.margins.tolist() == [0.5, 0.0]


def test_a_scored_pair_is_marked_at_its_last_tokens() -> None:
    (shard,) = whole(pack_pairs([make_pair(2, 1)], **pairs_options(scored=True)))
    (micro,) = micro_batches(shard)
    assert micro.loss_mask.tolist() == [0, 0, 0, 1, 0, 0, 1]
    assert micro.weights.tolist() == [0, 0, 0, 0.5, 0, 0, 0.5]


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20), st.floats(-3, 3, width=32)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.booleans(),
)
def test_the_two_of_a_pair_are_neighbours_whatever_the_cut(
    sizes: list[tuple[int, int, float]], num_shards: int, scored: bool
) -> None:
    pairs = [make_pair(*size) for size in sizes]
    shards = whole(pack_pairs(pairs, **pairs_options(num_shards=num_shards, micro_batch_tokens=44, scored=scored)))
    assert len({len(micro_batches(shard)) for shard in shards}) == 1
    seen: list[int] = []
    for micro in (micro for shard in shards for micro in micro_batches(shard)):
        assert micro.num_tokens <= 44 and micro.margins is not None
        assert len(micro.margins) == len(micro.sample_index) // 2
        if micro.sample_index[0] == FILLER_INDEX:
            continue
        found = micro.sample_index.reshape(-1, 2)
        assert (found[:, 0] % 2 == 0).all() and (found[:, 1] == found[:, 0] + 1).all()
        assert micro.margins.tolist() == [pairs[index].margin for index in found[:, 0] // 2]
        sums = np.add.reduceat(micro.weights, micro.cu_seqlens[:-1]).reshape(-1, 2).sum(1)
        assert sums == pytest.approx(1 / len(pairs), rel=1e-5)
        seen += found[:, 0].tolist()
    assert sorted(seen) == [2 * index for index in range(len(pairs))]


def test_a_pair_over_the_budget_is_asserted() -> None:
    with pytest.raises(AssertionError, match="11 tokens that stay together, over micro_batch_tokens=10"):
        pack_pairs([make_pair(3, 4)], **pairs_options(micro_batch_tokens=10))


def make_labelled(length: int, *, desirable: bool) -> Unpaired:
    """An answer of so many tokens to a prompt of two."""
    return Unpaired(make_pair(length, 1).chosen, desirable)


def test_labelled_answers_weigh_one_over_the_rows_each() -> None:
    rows = [make_labelled(2, desirable=True), make_labelled(1, desirable=False)]
    (shard,) = whole(pack_unpaired(rows, num_shards=1, micro_batch_tokens=64))
    (micro,) = micro_batches(shard)
    assert micro.tokens.tolist() == [1, 2, 10, 11, 1, 2, 10]
    assert micro.weights.tolist() == [0, 0.25, 0.25, 0, 0, 0.5, 0]
    assert micro.desirable is not None and micro.desirable.tolist() == [1, 0]


@given(
    st.lists(st.tuples(st.integers(1, 20), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 4),
)
def test_labelled_answers_keep_their_labels_whatever_the_cut(rows: list[tuple[int, bool]], num_shards: int) -> None:
    made = [make_labelled(length, desirable=desirable) for length, desirable in rows]
    shards = whole(pack_unpaired(made, num_shards=num_shards, micro_batch_tokens=22))
    found, total = {}, 0.0
    for micro in (micro for shard in shards for micro in micro_batches(shard)):
        assert micro.desirable is not None and len(micro.desirable) == len(micro.cu_seqlens) - 1
        total += float(micro.weights.sum())
        for index, length, label in zip(micro.sample_index, np.diff(micro.cu_seqlens), micro.desirable, strict=True):
            if index != FILLER_INDEX:
                found[int(index)] = int(length) - 2, bool(label)
    assert [found[index] for index in range(len(rows))] == rows
    assert total == pytest.approx(1)


def test_images_travel_with_their_sequences() -> None:
    """Of a sample of several sequences with the first, which has the prompt."""
    first, second = make_sample("a", [1, 2], [3, 4, 5, 6], [1, 0, 0, 1]), make_sample("b", [7], [8])
    shown = replace(first.prompt, images=(Image(b"", 4, 4), Image(b"", 4, 4)))
    first = replace(first, prompt=shown, images=(b"one", b"two"), starts=(2,))
    (micro,) = micro_batches(pack([first, second], **options())[0])
    assert micro.images == ((b"one", b"two"), (), ()) and len(micro.images) == len(micro.sample_index)
    (micro,) = micro_batches(pack([second, replace(first, starts=())], **options())[0])
    assert micro.images == ((), (b"one", b"two"))
    shards = pack([first, second], **options(num_shards=2, micro_batch_tokens=8))
    assert sorted((micro.images or ()) for shard in shards for micro in micro_batches(shard)) == [
        (),
        ((b"one", b"two"), ()),
    ]
