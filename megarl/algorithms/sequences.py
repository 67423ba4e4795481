"""Sums over the sequences of a packed micro-batch, on tensors: for losses that look at a sequence as a whole.

A context-parallel rank holds parts of sequences. There the sums are local, and whoever calls adds them up over the ranks
before the mean: nothing here knows of other ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_index(cu_seqlens: Tensor) -> Tensor:
    """The number of each position's sequence: [T] int64; for whole sequences. cu_seqlens: [S + 1] integers from 0."""
    lengths = cu_seqlens.diff()
    return torch.repeat_interleave(torch.arange(len(lengths), device=cu_seqlens.device), lengths)


def sequence_sums(values: Tensor, index: Tensor, num_sequences: int) -> Tensor:
    """Sum of the values of each sequence that are here: [S] float32, or float64 for such values; differentiable.

    values: [T] float, 0 where they do not count. index: [T] int64, the number of each position's sequence.
    """
    kind = torch.promote_types(values.dtype, torch.float32)
    return torch.zeros(num_sequences, dtype=kind, device=values.device).index_add(0, index, values.to(kind))


def spread_means(sums: Tensor, counts: Tensor, index: Tensor) -> Tensor:
    """Each position's sequence's mean, sum / count: [T]. A sequence without anything that counts has mean 0.

    sums, counts: [S], over all ranks that hold a part of the sequence. index: [T] int64.
    """
    return (sums / counts.clamp(min=1))[index]


def sequence_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Mean of logprobs - old_logprobs over the trained tokens of each position's sequence: [T], without gradient.

    For whole sequences. Where they are cut over ranks: sequence_sums of the masked difference and of the mask, both summed
    over the ranks, then spread_means. logprobs, old_logprobs: [T]. mask: [T], 1 where the label is trained on.
    """
    index, num = sequence_index(cu_seqlens), len(cu_seqlens) - 1
    difference = (logprobs - old_logprobs).detach().where(mask > 0, 0)
    sums, counts = sequence_sums(difference, index, num), sequence_sums(mask, index, num)
    return spread_means(sums, counts, index)
