"""Samples, and rows of supervised training, as blocks: sequences end to end with their label-aligned columns.

A block holds what one process has of a shard. Not for what shards are made of (deal.py), nor for shards (pack.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megarl.core.types import Block, FloatArray, IntArray, RoutingArray, Sample
from megarl.data.sft import Demonstration

# An expert that nobody chose: the routing of a token that is not known.
UNKNOWN_EXPERT = -1


def sample_block(samples: Sequence[Sample], indices: IntArray, weights: FloatArray) -> Block:
    """Samples as they lie in one process, in the given order. None may have an empty prompt.

    indices, weights: [n], of each sample: its number in the step, and what each of its trained tokens counts for.
    """
    for sample in samples:
        _check(sample)
    pieces = [piece for sample in samples for piece in (sample.prompt.token_ids, sample.response_ids)]
    sizes = np.array([len(piece) for piece in pieces], np.int64)
    in_response = np.repeat(np.arange(len(pieces)) % 2 == 1, sizes)
    mask, logprobs = np.zeros(len(in_response), np.float32), np.zeros(len(in_response), np.float32)
    mask[in_response] = joined([sample.loss_mask for sample in samples], np.float32)
    logprobs[in_response] = joined([sample.rollout_logprobs for sample in samples], np.float32)
    lengths = sizes.reshape(-1, 2).sum(axis=1)
    mask, logprobs = _shift(mask, lengths), _shift(logprobs, lengths)
    return _block(
        lengths,
        joined(pieces, np.int64),
        mask,
        indices,
        weights,
        rollout_logprobs=np.where(mask > 0, logprobs, np.float32(0)),
        routing=_routing(samples, lengths),
    )


def row_block(
    rows: Sequence[Demonstration],
    indices: IntArray,
    weights: FloatArray,
    margins: FloatArray | None = None,
    *,
    scored: bool = False,
) -> Block:
    """Rows of supervised training, as `sample_block`. margins: [n] of pairs, see Block; scored: see `pack_pairs`."""
    lengths = np.array([len(row.token_ids) for row in rows], np.int64)
    mask = joined([row.loss_mask for row in rows], np.float32)
    if scored:
        mask = np.zeros_like(mask)
        mask[np.cumsum(lengths) - 1] = 1
    else:
        mask = _shift(mask, lengths)
    tokens = joined([row.token_ids for row in rows], np.int64)
    return _block(lengths, tokens, mask, indices, weights, rollout_logprobs=np.zeros_like(mask), margins=margins)


def _block(
    lengths: IntArray, tokens: IntArray, mask: FloatArray, indices: IntArray, weights: FloatArray, **others: Any
) -> Block:
    assert len(lengths) == len(indices) == len(weights), (len(lengths), len(indices), len(weights))
    return Block(
        lengths=lengths,
        tokens=tokens,
        labels=_shift(tokens, lengths),
        loss_mask=mask,
        weights=mask * np.repeat(weights.astype(np.float32), lengths),
        sample_index=indices.astype(np.int64),
        **others,
    )


def _check(sample: Sample) -> None:
    assert len(sample.prompt.token_ids), f"sample {sample.id} has an empty prompt"
    assert len(sample.loss_mask) == len(sample.rollout_logprobs) == len(sample.response_ids), (
        f"sample {sample.id}: {len(sample.response_ids)} response tokens, {len(sample.loss_mask)} mask entries, "
        f"{len(sample.rollout_logprobs)} log-probs"
    )


def _routing(samples: Sequence[Sample], lengths: IntArray) -> RoutingArray | None:
    """The routing of all; unknown for samples without, and for last tokens, which no server has put through the model."""
    widths = {sample.routing.shape[1] for sample in samples if sample.routing is not None}
    if not widths:
        return None
    [width] = widths
    whole = np.full((int(lengths.sum()), width), UNKNOWN_EXPERT, np.int16)
    for sample, first in zip(samples, np.cumsum(lengths) - lengths, strict=True):
        if sample.routing is not None:
            rows = len(sample.routing)
            assert rows <= sample.num_tokens, (sample.id, rows, sample.num_tokens)
            whole[first : first + rows] = sample.routing
    return whole


def _shift(column: NDArray[Any], lengths: IntArray) -> NDArray[Any]:
    """From token-aligned [T] (position t speaks of token t) to label-aligned [T]; the last of a sequence predicts nothing."""
    shifted = np.zeros_like(column)
    shifted[:-1] = column[1:]
    shifted[np.cumsum(lengths) - 1] = 0
    return shifted


def joined(parts: Sequence[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    """End to end; nothing where there are no parts."""
    return np.concatenate([np.zeros(0, dtype), *parts], dtype=dtype)
