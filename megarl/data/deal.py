"""Decides, from lengths alone, what a step's shards are made of: mini-batches in order, balanced over data-parallel shards,
cut into micro-batches.

Every shard of a mini-batch has the same number of micro-batches, because collectives of the training step run once for
each; where a shard has too few samples, a filler keeps the count. The weights carry the global denominator of the
mini-batch, so the loss depends neither on the number of shards nor on the budget.

Not for tokens: those may lie in other processes (pack.py makes shards of them).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.algorithms.reduce import Reduction, sample_weights
from megarl.core.types import FloatArray, IntArray, ShardPlan


@dataclass(frozen=True)
class Dealt:
    """A step of N samples.

    plans: one a shard. parts: [owner][shard], indices of the owner's samples in the order of its block of the shard.
    weights: [N], what each trained token of a sample counts for.
    """

    plans: tuple[ShardPlan, ...]
    parts: tuple[tuple[IntArray, ...], ...]
    weights: FloatArray


def deal_step(
    lengths: IntArray,
    counts: IntArray,
    groups: IntArray,
    owners: IntArray,
    *,
    num_owners: int,
    num_shards: int,
    mini_batch_samples: int,
    micro_batch_tokens: int,
    reduction: Reduction,
    max_response_tokens: int,
    together: int = 1,
) -> Dealt:
    """What each shard is made of, and which samples each owner gives for it.

    lengths, counts, groups, owners: [N] in the order of the step: tokens of prompt and response, trained tokens, number of
    the group, and who holds the sample (0 to num_owners - 1).
    Samples are cut into mini-batches of `mini_batch_samples` in the given order; the last may be smaller. Within each, they
    are assigned to the shards by tokens (longest first, to the lightest shard), then packed into micro-batches. Weights
    come from `algorithms.reduce.sample_weights` over a whole mini-batch, whoever owns its samples.
    together: so many neighbours stay in one micro-batch; 2 for pairs. Divides `mini_batch_samples` and N.

    No neighbours may have more than `micro_batch_tokens` (the recipe check sees to it).
    """
    assert num_shards >= 1 and mini_batch_samples >= 1, (num_shards, mini_batch_samples)
    assert len(lengths) == len(counts) == len(groups) == len(owners), (
        len(lengths),
        len(counts),
        len(groups),
        len(owners),
    )
    assert all(0 <= owner < num_owners for owner in np.unique(owners)), f"owners {np.unique(owners)} of {num_owners}"
    assert len(lengths) % together == mini_batch_samples % together == 0, (len(lengths), mini_batch_samples, together)
    weights = np.zeros(len(lengths), np.float32)
    order: list[list[int]] = [[] for _ in range(num_shards)]
    micro_counts: list[list[tuple[int, ...]]] = [[] for _ in range(num_shards)]
    for start in range(0, len(lengths), mini_batch_samples):
        mini = slice(start, start + mini_batch_samples)
        group_index = np.unique(groups[mini], return_inverse=True)[1]
        weights[mini] = sample_weights(counts[mini], reduction, max_response_tokens, group_index)
        units: list[int] = lengths[mini].reshape(-1, together).sum(axis=1).tolist()
        assert max(units) <= micro_batch_tokens, (
            f"{max(units)} tokens that stay together, over micro_batch_tokens={micro_batch_tokens}"
        )
        for shard, bins in enumerate(deal(units, num_shards, micro_batch_tokens)):
            micro_counts[shard].append(tuple(together * len(bin_) for bin_ in bins))
            firsts = (start + together * unit for bin_ in bins for unit in sorted(bin_))
            order[shard] += [first + each for first in firsts for each in range(together)]
    made = [
        _owned(tuple(shard_counts), np.array(samples, np.int64), owners, num_owners)
        for shard_counts, samples in zip(micro_counts, order, strict=True)
    ]
    parts = tuple(tuple(parts[owner] for _, parts in made) for owner in range(num_owners))
    return Dealt(tuple(plan for plan, _ in made), parts, weights)


def _owned(
    counts: tuple[tuple[int, ...], ...], samples: IntArray, owners: IntArray, num_owners: int
) -> tuple[ShardPlan, list[IntArray]]:
    """A shard's plan, and the samples of each owner, which lie in its block in the order in which they come here.

    samples: [S], of all micro-batches in their order. owners: [N].
    """
    whose = owners[samples].astype(np.int64)
    positions = np.zeros(len(samples), np.int64)
    parts = []
    for owner in range(num_owners):
        mine = np.flatnonzero(whose == owner)
        positions[mine] = np.arange(len(mine))
        parts.append(samples[mine])
    return ShardPlan(counts, whose, positions), parts


def deal(lengths: Sequence[int], num_shards: int, budget: int) -> list[list[list[int]]]:
    """Shards of equally many micro-batches of items. lengths: of each item, in tokens; budget: of a micro-batch.

    Shards hold about as many tokens each, and so do the micro-batches of one where they fit; some may be empty.
    """
    parts = _deal(lengths, _longest_first(lengths), num_shards)
    packed = [_first_fit(lengths, part, budget) for part in parts]
    num_micro = max(1, *(len(bins) for bins in packed))
    return [_even_out(lengths, part, bins, num_micro, budget) for part, bins in zip(parts, packed, strict=True)]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    """All items, ties in their order."""
    return sorted(range(len(lengths)), key=lambda item: -lengths[item])


def _deal(lengths: Sequence[int], items: Sequence[int], num_bins: int) -> list[list[int]]:
    """Longest-processing-time scheduling: each item, in the given order, to the lightest bin; ties to the first."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, index) for index in range(num_bins)]
    for item in items:
        load, index = heap[0]
        bins[index].append(item)
        heapq.heapreplace(heap, (load + lengths[item], index))
    return bins


def _first_fit(lengths: Sequence[int], items: Sequence[int], budget: int) -> list[list[int]]:
    """Each item, in the given order, into the first bin with room, else into a new one.

    A tree holds the most room under each node, so that the first bin is found without looking at all before it.
    """
    # Two neighbouring bins hold more than one budget together, or the second would not have been opened.
    most = min(len(items), 2 * sum(lengths[item] for item in items) // budget + 1)
    size = 1 << max(0, most - 1).bit_length()
    room = [budget] * (2 * size)  # node n is above 2n and 2n + 1; bins are the last `size`
    bins: list[list[int]] = [[] for _ in range(size)]
    for item in items:
        length, node = lengths[item], 1
        while node < size:
            node *= 2
            node += room[node] < length
        bins[node - size].append(item)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [bin_ for bin_ in bins if bin_]


def _even_out(
    lengths: Sequence[int], items: Sequence[int], bins: list[list[int]], num_bins: int, budget: int
) -> list[list[int]]:
    """Exactly `num_bins` bins of the items within the budget, evenly loaded where that fits; empty ones are fillers.

    items: longest first. bins: of these, within the budget.
    """
    even = _deal(lengths, items, num_bins)
    if all(sum(lengths[item] for item in bin_) <= budget for bin_ in even):
        return even
    return [*bins, *([] for _ in range(num_bins - len(bins)))]
