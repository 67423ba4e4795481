"""Packs samples into shards: mini-batches in order, balanced over data-parallel shards, cut into micro-batches.

Every shard of a mini-batch has the same number of micro-batches, because collectives of the training step run once for
each; where a shard has too few samples, a filler of one token without any weight keeps the count. The weights carry the
global denominator of the mini-batch, so the loss depends neither on the number of shards nor on the budget.

Not for tensors or devices: arrays only.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megarl.algorithms.reduce import Reduction, sample_weights
from megarl.core.types import Column, FloatArray, IntArray, MicroBatch, MiniBatch, RoutingArray, Sample, Shard
from megarl.data.pairs import Pair
from megarl.data.sft import Demonstration

# The `sample_index` of a filler's only sequence.
FILLER_INDEX = -1
# An expert that nobody chose: the routing of a token that is not known.
UNKNOWN_EXPERT = -1


@dataclass(frozen=True)
class _Sequence:
    """One sample, label-aligned: position t of mask and log-probs speaks of predicting token t + 1.

    margin: of the pair that begins with this sequence.
    """

    index: int
    group: int
    tokens: IntArray  # [L]
    mask: FloatArray  # [L]
    rollout_logprobs: FloatArray  # [L]
    routing: RoutingArray | None = None  # [L, layers x k]
    margin: float | None = None


# Sequences that share a micro-batch: one, or the two of a pair.
_Unit = tuple[_Sequence, ...]


def pack(
    samples: Sequence[Sample],
    *,
    num_shards: int,
    mini_batch_samples: int,
    micro_batch_tokens: int,
    reduction: Reduction,
    max_response_tokens: int,
) -> list[Shard]:
    """One shard for each data-parallel rank.

    Samples are cut into mini-batches of `mini_batch_samples` in the given order; the last may be smaller. Within each,
    samples are assigned to the shards by tokens (longest first, to the lightest shard), then packed.
    `MicroBatch.sample_index` counts in `samples`; `FILLER_INDEX` marks a filler. The weights of a mini-batch come from
    `algorithms.reduce.sample_weights` over all its samples, whichever shard they are in.

    No sample may be longer than `micro_batch_tokens` (the recipe check sees to it), none may have an empty prompt.
    """
    assert num_shards >= 1 and mini_batch_samples >= 1, (num_shards, mini_batch_samples)
    groups: dict[str, int] = {}
    sequences = [
        (_from_sample(index, groups.setdefault(sample.group_id, len(groups)), sample),)
        for index, sample in enumerate(samples)
    ]
    minis = [
        _pack_mini_batch(
            sequences[start : start + mini_batch_samples],
            num_shards,
            micro_batch_tokens,
            reduction,
            max_response_tokens,
        )
        for start in range(0, len(sequences), mini_batch_samples)
    ]
    return [Shard(tuple(mini[shard] for mini in minis)) for shard in range(num_shards)]


def pack_sft(demonstrations: Sequence[Demonstration], *, num_shards: int, micro_batch_tokens: int) -> list[Shard]:
    """Demonstrations of one optimizer step, as one mini-batch whose loss is the mean over all trained tokens."""
    units = [(_from_demonstration(index, item, _shift(item.loss_mask)),) for index, item in enumerate(demonstrations)]
    mini = _pack_mini_batch(units, num_shards, micro_batch_tokens, "token-mean", 1)
    return [Shard((mini[shard],)) for shard in range(num_shards)]


def pack_pairs(pairs: Sequence[Pair], *, num_shards: int, micro_batch_tokens: int, scored: bool) -> list[Shard]:
    """Pairs of one optimizer step, as one mini-batch. Pair i is the sequences 2i (chosen) and 2i + 1 (rejected).

    The two of a pair are neighbours in one micro-batch. The weights of a pair's positions add up to 1 / number of pairs.
    scored: the mask marks the last token, where a score head is read; otherwise the response's labels.

    No pair may be longer than `micro_batch_tokens` (the recipe check sees to it).
    """
    units: list[_Unit] = []
    for index, pair in enumerate(pairs):
        chosen, rejected = (
            _from_demonstration(2 * index + side, each, _last(each) if scored else _shift(each.loss_mask))
            for side, each in enumerate((pair.chosen, pair.rejected))
        )
        units.append((replace(chosen, margin=pair.margin), rejected))
    mini = _pack_mini_batch(units, num_shards, micro_batch_tokens, "sequence-mean", 1)
    return [Shard((mini[shard],)) for shard in range(num_shards)]


def merge_shards(shards: Sequence[Shard]) -> Shard:
    """Several shards of a step as one: each mini-batch has the micro-batches of all, shard by shard."""
    return Shard(
        tuple(
            MiniBatch(tuple(micro for mini in minis for micro in mini.micro_batches))
            for minis in zip(*(shard.mini_batches for shard in shards), strict=True)
        )
    )


def merge_columns(columns: Sequence[Column]) -> Column:
    """The columns of several shards as the column of `merge_shards` of these."""
    return [[part for mini in minis for part in mini] for minis in zip(*columns, strict=True)]


def split_column(column: Column, shards: Sequence[Shard]) -> list[Column]:
    """The column of `merge_shards(shards)` as one column a shard."""
    found: list[Column] = [[] for _ in shards]
    for index, mini in enumerate(column):
        first = 0
        for shard, mine in zip(shards, found, strict=True):
            last = first + len(shard.mini_batches[index].micro_batches)
            mine.append(mini[first:last])
            first = last
    return found


def column_like(shard: Shard, values: ArrayLike) -> Column:
    """Spread one value a sample over the trained positions of its sequence; 0 elsewhere and in fillers.

    values: [N], in the order of the samples that were packed.
    """
    # The last entry is what FILLER_INDEX selects; it also gives an empty step something to select.
    padded = np.append(np.asarray(values, dtype=np.float32), np.float32(0))
    return [
        [
            np.where(micro.loss_mask > 0, np.repeat(padded[micro.sample_index], np.diff(micro.cu_seqlens)), 0).astype(
                np.float32
            )
            for micro in mini.micro_batches
        ]
        for mini in shard.mini_batches
    ]


def _from_sample(index: int, group: int, sample: Sample) -> _Sequence:
    prompt, response = sample.prompt.token_ids, sample.response_ids
    assert len(prompt), f"sample {sample.id} has an empty prompt"
    assert len(sample.loss_mask) == len(sample.rollout_logprobs) == len(response), (
        f"sample {sample.id}: {len(response)} response tokens, {len(sample.loss_mask)} mask entries, "
        f"{len(sample.rollout_logprobs)} log-probs"
    )
    before = np.zeros(len(prompt), np.float32)
    mask = _shift(np.concatenate([before, sample.loss_mask.astype(np.float32)]))
    logprobs = _shift(np.concatenate([before, sample.rollout_logprobs]))
    return _Sequence(
        index,
        group,
        np.concatenate([prompt, response]),
        mask,
        np.where(mask > 0, logprobs, 0).astype(np.float32),
        _routing(sample),
    )


def _from_demonstration(index: int, item: Demonstration, mask: FloatArray) -> _Sequence:
    return _Sequence(index, index, item.token_ids, mask, np.zeros(len(item.token_ids), np.float32))


def _last(item: Demonstration) -> FloatArray:
    mask = np.zeros(len(item.token_ids), np.float32)
    mask[-1] = 1
    return mask


def _routing(sample: Sample) -> RoutingArray | None:
    """The sample's routing, and an unknown one for its last token, which no server has put through the model."""
    if sample.routing is None:
        return None
    rows, width = sample.routing.shape
    assert rows <= sample.num_tokens, (sample.id, rows, sample.num_tokens)
    whole = np.full((sample.num_tokens, width), UNKNOWN_EXPERT, np.int16)
    whole[:rows] = sample.routing
    return whole


def _shift(column: NDArray[np.generic]) -> FloatArray:
    """From token-aligned [L] (position t speaks of token t) to label-aligned [L]; the last predicts nothing."""
    shifted = np.zeros(len(column), np.float32)
    shifted[:-1] = column[1:]
    return shifted


def _pack_mini_batch(
    units: Sequence[_Unit], num_shards: int, budget: int, reduction: Reduction, max_response_tokens: int
) -> list[MiniBatch]:
    """The part of each shard: equally many micro-batches in each."""
    lengths = [sum(len(sequence.tokens) for sequence in unit) for unit in units]
    assert max(lengths, default=0) <= budget, (
        f"{max(lengths)} tokens that stay together, over micro_batch_tokens={budget}"
    )
    sequences = [sequence for unit in units for sequence in unit]
    counts, groups = [s.mask.sum() for s in sequences], np.array([s.group for s in sequences], np.int64)
    weights = sample_weights(counts, reduction, max_response_tokens, np.unique(groups, return_inverse=True)[1])
    weight_of = {sequence.index: weight for sequence, weight in zip(sequences, weights, strict=True)}
    return [
        MiniBatch(tuple(_build([sequence for i in bin_ for sequence in units[i]], weight_of) for bin_ in bins))
        for bins in deal(lengths, num_shards, budget)
    ]


def deal(lengths: Sequence[int], num_shards: int, budget: int) -> list[list[list[int]]]:
    """Shards of equally many micro-batches of items. lengths: of each item, in tokens; budget: of a micro-batch.

    Shards hold about as many tokens each, and so do the micro-batches of one where they fit; some may be empty.
    """
    packed = [_first_fit(lengths, part, budget) for part in _deal(lengths, range(len(lengths)), num_shards)]
    num_micro = max(1, *(len(bins) for bins in packed))
    return [_even_out(lengths, bins, num_micro, budget) for bins in packed]


def _longest_first(lengths: Sequence[int], items: Sequence[int]) -> list[int]:
    return sorted(items, key=lambda item: (-lengths[item], item))


def _deal(lengths: Sequence[int], items: Sequence[int], num_bins: int) -> list[list[int]]:
    """Longest-processing-time scheduling: each item, longest first, to the lightest bin; ties to the first."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, index) for index in range(num_bins)]
    for item in _longest_first(lengths, items):
        load, index = heap[0]
        bins[index].append(item)
        heapq.heapreplace(heap, (load + lengths[item], index))
    return bins


def _first_fit(lengths: Sequence[int], items: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit decreasing: each item, longest first, into the first bin with room, else into a new one."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item in _longest_first(lengths, items):
        length = lengths[item]
        index = next((i for i, left in enumerate(room) if left >= length), len(bins))
        if index == len(bins):
            bins.append([])
            room.append(budget)
        bins[index].append(item)
        room[index] -= length
    return bins


def _even_out(lengths: Sequence[int], bins: list[list[int]], num_bins: int, budget: int) -> list[list[int]]:
    """Exactly `num_bins` bins within the budget, evenly loaded where that fits; empty ones are fillers."""
    even = _deal(lengths, [item for bin_ in bins for item in bin_], num_bins)
    if all(sum(lengths[item] for item in bin_) <= budget for bin_ in even):
        return even
    return [*bins, *([] for _ in range(num_bins - len(bins)))]


def _build(sequences: Sequence[_Sequence], weight_of: Mapping[int, np.float32]) -> MicroBatch:
    """Sequences end to end, in the order of the samples; a filler where there are none. weight_of: by index."""
    if not sequences:
        zero = np.zeros(1, np.float32)
        return MicroBatch(
            tokens=np.zeros(1, np.int64),
            labels=np.zeros(1, np.int64),
            cu_seqlens=np.array([0, 1], np.int32),
            loss_mask=zero,
            weights=zero,
            rollout_logprobs=zero,
            sample_index=np.array([FILLER_INDEX], np.int64),
            margins=np.zeros(0, np.float32),
        )
    parts = sorted(sequences, key=lambda sequence: sequence.index)
    margins = [part.margin for part in parts if part.margin is not None]
    labels = [np.append(part.tokens[1:], 0) for part in parts]
    return MicroBatch(
        tokens=np.concatenate([part.tokens for part in parts]),
        labels=np.concatenate(labels).astype(np.int64),
        cu_seqlens=np.cumsum([0, *(len(part.tokens) for part in parts)], dtype=np.int32),
        loss_mask=np.concatenate([part.mask for part in parts]),
        weights=np.concatenate([part.mask * weight_of[part.index] for part in parts]).astype(np.float32),
        rollout_logprobs=np.concatenate([part.rollout_logprobs for part in parts]),
        sample_index=np.array([part.index for part in parts], np.int64),
        routing=_all_routing([part.routing for part in parts]),
        margins=np.array(margins, np.float32) if margins else None,
    )


def _all_routing(parts: Sequence[RoutingArray | None]) -> RoutingArray | None:
    """The routing of a micro-batch; none where that of a sequence is missing."""
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if len(known) == len(parts) else None
