"""The sequences of a step that lie in one process, as arrays end to end: from columns to samples and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.algorithms.ragged import sequence_sums
from megarl.core.types import Block, FloatArray

NO_NUMBERS: FloatArray = np.zeros(0, np.float32)


class Sequences:
    """A collector's sequences of a step end to end, shard by shard: T positions; n of them, one of each sample."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        records = [record for block in blocks for record in block.records]
        self.mask = joined([record.loss_mask for record in records])  # [T]
        self.rollout_logprobs = joined([record.rollout_logprobs for record in records])  # [T]
        lengths = joined([block.lengths for block in blocks]).astype(np.int64)
        self.cu_seqlens = np.concatenate([[0], lengths]).cumsum()  # [n + 1]
        order = joined([block.sample_index for block in blocks]).astype(np.int64)
        self.sample_index = np.sort(order)  # [n]: index in the step of each of this collector's samples
        self._sample = np.searchsorted(self.sample_index, order)  # [n]: which of these samples each sequence is
        self._cuts = np.cumsum([block.num_tokens for block in blocks])[:-1]

    def flat(self, column: Sequence[FloatArray]) -> FloatArray:
        """A column as [T], 0 outside of the mask."""
        return np.where(self.mask > 0, self._whole(column), 0).astype(np.float32)

    def at_ends(self, column: Sequence[FloatArray]) -> FloatArray:
        """What a column says at the last token of each sample: [n]."""
        return self.by_sample(self._whole(column)[self.cu_seqlens[1:] - 1])

    def after_label(self, column: Sequence[FloatArray]) -> FloatArray:
        """At each trained position what a column says one token later, of the state after the label: [T]."""
        later = np.append(self._whole(column)[1:], np.float32(0))[: len(self.mask)]
        return np.where(self.mask > 0, later, 0).astype(np.float32)

    def by_sequence(self, values: NDArray[Any]) -> NDArray[Any]:
        """One number a sample [n], in the order of sequences."""
        chosen: NDArray[Any] = values[self._sample]
        return chosen

    def by_sample(self, values: NDArray[Any]) -> NDArray[Any]:
        """One number a sequence [n], in the order of samples."""
        result = np.zeros_like(values)
        result[self._sample] = values
        return result

    def sums(self, values: FloatArray) -> NDArray[np.float64]:
        """Sum of [T] over each sample's trained positions: [n]."""
        return self.by_sample(sequence_sums(values, self.mask, self.cu_seqlens))

    def spread(self, values: FloatArray) -> FloatArray:
        """One number a sample [n] at each of its trained positions: [T]."""
        repeated = np.repeat(self.by_sequence(values), np.diff(self.cu_seqlens))
        return np.where(self.mask > 0, repeated, 0).astype(np.float32)

    def by_shard(self, values: FloatArray) -> list[FloatArray]:
        """[T] as one array a shard."""
        return [np.ascontiguousarray(part, np.float32) for part in np.split(values, self._cuts)]

    def _whole(self, column: Sequence[FloatArray]) -> FloatArray:
        whole = joined(column)
        assert len(whole) == len(self.mask), f"a column has {len(whole)} positions, its blocks {len(self.mask)}"
        return whole


def joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """End to end; an empty array where there are no parts."""
    return np.concatenate(parts) if parts else NO_NUMBERS
