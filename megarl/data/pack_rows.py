"""Rows of supervised training as the shards that ranks work on: the mini-batch of one optimizer step, from one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megarl.algorithms.reduce import Reduction
from megarl.core.types import Block, FloatArray, IntArray
from megarl.data.blocks import row_block
from megarl.data.deal import Dealt, deal_step
from megarl.data.pack import Packed, packed

if TYPE_CHECKING:
    from megarl.data.pairs import Pair
    from megarl.data.sft import Demonstration
    from megarl.data.unpaired import Unpaired


def pack_sft(
    demonstrations: Sequence[Demonstration],
    *,
    num_shards: int,
    micro_batch_tokens: int,
) -> list[Packed]:
    """Demonstrations of one optimizer step, as one mini-batch whose loss is the mean over all trained tokens."""
    counts = [int(each.loss_mask[1:].sum()) for each in demonstrations]
    dealt = _deal_rows(demonstrations, counts, 1, num_shards, micro_batch_tokens, "token-mean")

    def block(part: IntArray, weights: FloatArray) -> Block:
        return row_block([demonstrations[index] for index in part], part, weights)

    return packed(dealt, block)


def pack_pairs(
    pairs: Sequence[Pair],
    *,
    num_shards: int,
    micro_batch_tokens: int,
    scored: bool,
) -> list[Packed]:
    """Pairs of one optimizer step, as one mini-batch. Pair i is the sequences 2i (chosen) and 2i + 1 (rejected).

    The two of a pair are neighbours in one micro-batch. The weights of a pair's positions add up to 1 / number of pairs.
    scored: the mask marks the last token, where a score head is read; otherwise the response's labels.

    No pair may be longer than `micro_batch_tokens` (the recipe check sees to it).
    """
    sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    margins = np.array([margin for pair in pairs for margin in (pair.margin, 0.0)], np.float32)
    counts = [1 if scored else int(side.loss_mask[1:].sum()) for side in sides]
    dealt = _deal_rows(sides, counts, 2, num_shards, micro_batch_tokens, "sequence-mean")

    def block(part: IntArray, weights: FloatArray) -> Block:
        return row_block([sides[index] for index in part], part, weights, margins[part], scored=scored)

    return packed(dealt, block)


def pack_unpaired(rows: Sequence[Unpaired], *, num_shards: int, micro_batch_tokens: int) -> list[Packed]:
    """Labelled answers of one optimizer step, as one mini-batch. The weights of an answer's positions add up to 1 / rows."""
    answers, desirable = [row.answer for row in rows], np.array([row.desirable for row in rows], np.float32)
    counts = [int(answer.loss_mask[1:].sum()) for answer in answers]
    dealt = _deal_rows(answers, counts, 1, num_shards, micro_batch_tokens, "sequence-mean")

    def block(part: IntArray, weights: FloatArray) -> Block:
        return row_block([answers[index] for index in part], part, weights, desirable=desirable[part])

    return packed(dealt, block)


def _deal_rows(
    rows: Sequence[Demonstration],
    counts: Sequence[int],
    together: int,
    num_shards: int,
    micro_batch_tokens: int,
    reduction: Reduction,
) -> Dealt:
    """Rows as one mini-batch of one owner."""
    return deal_step(
        np.array([len(row.token_ids) for row in rows], np.int64),
        np.array(counts, np.int64),
        np.arange(len(rows)),
        np.zeros(len(rows), np.int64),
        num_owners=1,
        num_shards=num_shards,
        mini_batch_samples=max(together, len(rows)),
        micro_batch_tokens=micro_batch_tokens,
        reduction=reduction,
        max_response_tokens=1,
        together=together,
    )
