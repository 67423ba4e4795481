"""Blocks as the shards that ranks work on: micro-batches of whole sequences, end to end.

A shard's sequences lie in one block for each process that holds some of them (their owner); its plan (deal.py) says how
they make its micro-batches. What comes out does not depend on who held what. Fillers of one token without any weight stand
where a shard has fewer sequences than micro-batches.

A column of a shard travels as its owners read and write it: one flat float32 array for each, in the order of its block.
Not for tensors or devices: arrays only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megarl.algorithms.reduce import Reduction
from megarl.core.types import (
    UNKNOWN_EXPERT,
    Block,
    Column,
    FloatArray,
    IntArray,
    MicroBatch,
    MiniBatch,
    Picture,
    Record,
    RoutingArray,
    Sample,
    Shard,
    ShardPlan,
)
from megarl.data.blocks import joined, sample_block
from megarl.data.deal import Dealt, deal_step

FILLER_INDEX = -1  # the `sample_index` of a filler's only sequence

# A shard whose sequences all lie in one process.
Packed = tuple[ShardPlan, Block]


def pack(
    samples: Sequence[Sample],
    *,
    num_shards: int,
    mini_batch_samples: int,
    micro_batch_tokens: int,
    reduction: Reduction,
    max_response_tokens: int,
) -> list[Shard]:
    """One shard for each data-parallel rank, of samples that are all at hand. The options are `deal_step`'s.

    `MicroBatch.sample_index` counts in `samples`; `FILLER_INDEX` marks a filler.
    """
    found = pack_samples(
        samples,
        num_shards=num_shards,
        mini_batch_samples=mini_batch_samples,
        micro_batch_tokens=micro_batch_tokens,
        reduction=reduction,
        max_response_tokens=max_response_tokens,
    )
    return [assemble(plan, [block]) for plan, block in found]


def pack_samples(
    samples: Sequence[Sample],
    *,
    num_shards: int,
    mini_batch_samples: int,
    micro_batch_tokens: int,
    reduction: Reduction,
    max_response_tokens: int,
) -> list[Packed]:
    """A step whose samples lie in one process: plan and block of each shard. The options are `deal_step`'s."""
    numbers: dict[str, int] = {}
    dealt = deal_step(
        np.array([sample.num_tokens for sample in samples], np.int64),
        np.array([int(sample.loss_mask.sum()) for sample in samples], np.int64),
        np.array([numbers.setdefault(sample.group_id, len(numbers)) for sample in samples], np.int64),
        np.zeros(len(samples), np.int64),
        num_owners=1,
        num_shards=num_shards,
        mini_batch_samples=mini_batch_samples,
        micro_batch_tokens=micro_batch_tokens,
        reduction=reduction,
        max_response_tokens=max_response_tokens,
    )
    return packed(dealt, lambda part, weights: sample_block([samples[index] for index in part], part, weights))


def packed(dealt: Dealt, block: Callable[[IntArray, FloatArray], Block]) -> list[Packed]:
    """Plans with the only owner's blocks. block: of samples of these numbers and weights."""
    [parts] = dealt.parts
    return [(plan, block(part, dealt.weights[part])) for plan, part in zip(dealt.plans, parts, strict=True)]


def assemble(plan: ShardPlan, blocks: Sequence[Block]) -> Shard:
    """The shard whose sequences lie in these blocks, one an owner.

    A micro-batch is put together whenever it is looked at: a shard takes no more memory than its blocks.
    """
    order = _Order.of(plan, blocks)
    sequences = _Sequences.of(order, blocks)

    def mini(spans: Sequence[tuple[int, int]]) -> MiniBatch:
        return MiniBatch(MadeBatches([partial(_micro, sequences, *span) for span in spans]))

    return Shard(tuple(mini(spans) for spans in _spans(plan)))


class MadeBatches(Sequence[MicroBatch]):
    """Micro-batches that are made anew whenever they are looked at. makers: one for each."""

    def __init__(self, makers: Sequence[Callable[[], MicroBatch]]) -> None:
        self._makers = tuple(makers)

    def __len__(self) -> int:
        return len(self._makers)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...

    @overload
    def __getitem__(self, index: slice) -> MadeBatches: ...

    def __getitem__(self, index: int | slice) -> MicroBatch | MadeBatches:
        return MadeBatches(self._makers[index]) if isinstance(index, slice) else self._makers[index]()


def merge_shards(shards: Sequence[Shard]) -> Shard:
    """Several shards of a step as one: each mini-batch has the micro-batches of all, shard by shard."""

    def merged(minis: Sequence[MiniBatch]) -> MiniBatch:
        batches = [mini.micro_batches for mini in minis]
        return MiniBatch(MadeBatches([partial(each.__getitem__, at) for each in batches for at in range(len(each))]))

    return Shard(tuple(merged(minis) for minis in zip(*(shard.mini_batches for shard in shards), strict=True)))


def merge_columns(columns: Sequence[Column]) -> Column:
    """The columns of several shards as the column of `merge_shards` of these."""
    return [[part for mini in minis for part in mini] for minis in zip(*columns, strict=True)]


def split_column(
    column: Column, plans: Sequence[ShardPlan], blocks: Sequence[Sequence[Block]]
) -> list[list[FloatArray]]:
    """A column of merged shards as what goes to each shard's owners: [shard][owner], each [T, ..] in the order of the block.

    plans, blocks: those of the shards that were merged, in their order; blocks: [shard][owner]. Fillers are left out.
    """
    found = []
    first = [0] * len(column)
    none = np.zeros((0, *next((part.shape[1:] for mini in column for part in mini), ())), np.float32)
    for plan, mine in zip(plans, blocks, strict=True):
        parts: list[FloatArray] = []
        for index, (mini, counts) in enumerate(zip(column, plan.counts, strict=True)):
            micros = mini[first[index] : first[index] + len(counts)]
            first[index] += len(counts)
            parts += [part for part, count in zip(micros, counts, strict=True) if count]
        found.append(_Order.of(plan, mine).scatter(np.concatenate([none, *parts], dtype=np.float32)))
    return found


def join_columns(plan: ShardPlan, blocks: Sequence[Block], parts: Sequence[FloatArray]) -> Column:
    """A shard's column from its owners' parts, [T, ..] each in the order of the block: `split_column` undone; 0 in fillers."""
    order = _Order.of(plan, blocks)
    whole = order.gather(parts)
    return [
        [
            whole[order.bounds[first] : order.bounds[last]]
            if first < last
            else np.zeros((1, *whole.shape[1:]), np.float32)
            for first, last in spans
        ]
        for spans in _spans(plan)
    ]


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


@dataclass(frozen=True)
class _Order:
    """From blocks laid end to end to a shard: S sequences, T tokens.

    sequences: [S], where each sequence of the shard lies in the blocks; tokens: [T], likewise; both None where the blocks
    have the shard's order. bounds: [S + 1], cumulative tokens of the shard's sequences. sizes: tokens of each block.
    """

    sequences: IntArray | None
    tokens: IntArray | None
    bounds: IntArray
    sizes: list[int]

    @classmethod
    def of(cls, plan: ShardPlan, blocks: Sequence[Block]) -> _Order:
        counts = np.array([len(block.memories) for block in blocks])
        assert counts.sum() == len(plan.positions), (counts.tolist(), len(plan.positions))
        each = [block.lengths for block in blocks]
        lengths, sizes = _end_to_end(each), [int(mine.sum()) for mine in each]
        sequences = (np.cumsum(counts) - counts)[plan.owners] + plan.positions
        if np.array_equal(sequences, np.arange(len(sequences))):
            return cls(None, None, np.append(0, np.cumsum(lengths)), sizes)
        starts, mine = np.cumsum(lengths) - lengths, lengths[sequences]
        bounds = np.append(0, np.cumsum(mine))
        tokens = np.repeat(starts[sequences] - bounds[:-1], mine) + np.arange(bounds[-1])
        return cls(sequences, tokens, bounds, sizes)

    def of_sequences(self, parts: Sequence[Any]) -> NDArray[Any]:
        """What the blocks say of their sequences: [S]."""
        whole = _end_to_end(parts)
        return whole if self.sequences is None else whole[self.sequences]

    def gather(self, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """What the blocks say of their tokens: [T, ..]."""
        assert [len(part) for part in parts] == self.sizes, ([len(part) for part in parts], self.sizes)
        whole = _end_to_end(parts)
        return whole if self.tokens is None else whole[self.tokens]

    def scatter(self, values: FloatArray) -> list[FloatArray]:
        """A column of the shard, [T, ..], as one part a block."""
        assert len(values) == sum(self.sizes), (len(values), self.sizes)
        if self.tokens is not None:
            values, ordered = np.empty_like(values), values
            values[self.tokens] = ordered
        return np.split(values, np.cumsum(self.sizes)[:-1])


def _end_to_end(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _spans(plan: ShardPlan) -> list[list[tuple[int, int]]]:
    """Of each mini-batch and each of its micro-batches: its first sequence, and the one after its last."""
    found, last = [], 0
    for counts in plan.counts:
        ends = [last, *(last + np.cumsum(counts, dtype=int)).tolist()]
        found.append(list(pairwise(ends)))
        last = ends[-1]
    return found


@dataclass(frozen=True)
class _Sequences:
    """A shard's records in their order, S. width: of the routing, if a block has it. starts: of further sequences in each.

    images: of each.
    """

    records: Sequence[Record]
    weights: FloatArray
    sample_index: IntArray
    margins: FloatArray | None
    desirable: FloatArray | None
    routing: Sequence[RoutingArray | None]
    width: int | None
    starts: Sequence[tuple[int, ...]]
    images: Sequence[tuple[Picture, ...]]

    @classmethod
    def of(cls, order: _Order, blocks: Sequence[Block]) -> _Sequences:
        records = [record for block in blocks for record in block.records]
        routing = [each for block in blocks for each in block.routing or [None] * len(block.memories)]
        starts = [each for block in blocks for each in block.starts or [()] * len(block.memories)]
        images = [each for block in blocks for each in block.images or [()] * len(block.memories)]
        widths = {each.shape[1] for each in routing if each is not None}
        assert len(widths) <= 1, widths
        places = range(len(records)) if order.sequences is None else order.sequences.tolist()
        return cls(
            [records[place] for place in places],
            order.of_sequences([block.weights for block in blocks]),
            order.of_sequences([block.sample_index for block in blocks]),
            None if blocks[0].margins is None else order.of_sequences([block.margins for block in blocks]),
            None if blocks[0].desirable is None else order.of_sequences([block.desirable for block in blocks]),
            [routing[place] for place in places],
            next(iter(widths), None),
            [starts[place] for place in places],
            [images[place] for place in places],
        )


def _micro(of: _Sequences, first: int, last: int) -> MicroBatch:
    """A micro-batch of records [first, last); a filler where these are none."""
    if first == last:
        return _filler()
    records, starts = of.records[first:last], of.starts[first:last]
    lengths = np.array([len(record.tokens) for record in records], np.int64)
    bounds = np.append(0, np.cumsum(lengths))
    tokens = joined([record.tokens for record in records], np.int64)
    labels = np.empty_like(tokens)
    labels[:-1] = tokens[1:]
    further = np.array([bounds[at] + start for at, mine in enumerate(starts) for start in mine], np.int64)
    cu_seqlens = np.sort(np.append(bounds, further))
    labels[cu_seqlens[1:] - 1] = 0  # the last of a sequence predicts nothing
    mask = joined([record.loss_mask for record in records], np.float32)
    assert not mask[further - 1].any(), "the first token of a sequence is predicted by the one before it"
    return MicroBatch(
        tokens=tokens,
        labels=labels,
        cu_seqlens=cu_seqlens.astype(np.int32),
        loss_mask=mask,
        weights=mask * np.repeat(of.weights[first:last], lengths),
        rollout_logprobs=joined([record.rollout_logprobs for record in records], np.float32),
        sample_index=np.repeat(of.sample_index[first:last], [1 + len(mine) for mine in starts]),
        routing=_routing(of, first, bounds),
        margins=None if of.margins is None else of.margins[first:last:2],
        desirable=None if of.desirable is None else of.desirable[first:last],
        images=_images(of, first, last),
    )


def _images(of: _Sequences, first: int, last: int) -> tuple[tuple[Picture, ...], ...] | None:
    """Of each sequence in records [first, last): all of a record's are its first one's. None where there are none."""
    images = of.images[first:last]
    if not any(images):
        return None
    parts = zip(images, of.starts[first:last], strict=True)
    return tuple(each for mine, starts in parts for each in (mine, *((),) * len(starts)))


def _routing(of: _Sequences, first: int, bounds: IntArray) -> RoutingArray | None:
    """[T, layers x k] of the records from `first` on, whose bounds these are; None where the rollout told none of them."""
    if of.width is None or all(told is None for told in of.routing[first : first + len(bounds) - 1]):
        return None
    experts = np.full((int(bounds[-1]), of.width), UNKNOWN_EXPERT, np.int16)
    for at, start in enumerate(bounds[:-1].tolist(), first):
        if (told := of.routing[at]) is not None:
            experts[start : start + len(told)] = told
    return experts


def _filler() -> MicroBatch:
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
        desirable=zero,
    )
