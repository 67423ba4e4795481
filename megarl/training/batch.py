"""A MicroBatch as tensors on a rank's device, with its columns, and columns back. Processes exchange numpy.

Context and sequence parallel want every sequence padded to a multiple of `Layout.sequence_multiple`, and context parallel
cuts each padded sequence in 2 x CP chunks of which rank r holds chunks r and 2 x CP - 1 - r (causal attention is then the
same work on every rank). Nobody outside of this module sees the padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.core.layout import Layout
from megarl.core.types import TEACHER_TOP, FloatArray, IntArray, MicroBatch, RoutingArray

PADDING = -1
Bounds = NDArray[np.int32]  # cu_seqlens


@dataclass(frozen=True)
class DeviceBatch:
    """This rank's part of one packed forward pass: T tokens, S sequences; see MicroBatch for the fields that it shares."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64, counted from the start of each sequence
    labels: Tensor  # [T] int64
    cu_seqlens: Tensor  # [S + 1] int32, of the padded sequences over all context-parallel ranks
    mask: Tensor  # [T] float32, 1 where the label is trained on
    weights: Tensor  # [T] float32
    rollout_logprobs: Tensor  # [T] float32
    sequence: Tensor  # [T] int64, the number of each position's sequence
    host_bounds: Tensor  # cu_seqlens in the host's memory
    columns: dict[str, Tensor]  # name -> [T] or [T, n] float32, label-aligned
    # [T, layers x k] int16, experts chosen by the rollout; -1 where unknown. A whole mini-batch's are on the device at once.
    routing: Tensor | None = None
    margins: Tensor | None = None  # [S // 2] float32, of all pairs, also of those that other ranks hold parts of
    desirable: Tensor | None = None  # [S] float32, of labelled answers: see MicroBatch

    @property
    def num_tokens(self) -> int:
        """T, with padding."""
        return self.tokens.shape[0]

    @property
    def top_ids(self) -> Tensor | None:
        """[T, k] int64, a teacher's likeliest labels, where the columns have them."""
        return split_top(self.columns[TEACHER_TOP])[0] if TEACHER_TOP in self.columns else None


@dataclass(frozen=True)
class Cut:
    """Where the tokens of a micro-batch lie under a layout.

    cu_seqlens: [S + 1] int32, of the padded sequences. sources: for each context-parallel rank, [T / cp]: which token of
    the micro-batch stands there; PADDING where none does.
    """

    cu_seqlens: NDArray[np.int32]
    sources: tuple[IntArray, ...]

    def gather(self, parts: Sequence[FloatArray], num_tokens: int) -> FloatArray:
        """A column [num_tokens, ..] from the parts of all context-parallel ranks, each [T / cp, ..]."""
        whole = np.zeros((num_tokens, *parts[0].shape[1:]), np.float32)
        for source, part in zip(self.sources, parts, strict=True):
            here = source != PADDING
            whole[source[here]] = part[here]
        return whole


def cut_sequences(cu_seqlens: NDArray[np.int32], layout: Layout) -> Cut:
    """Pad the sequences and deal their chunks. cu_seqlens: [S + 1], from 0; sequences may be empty."""
    multiple, cp = layout.sequence_multiple, layout.cp
    lengths = np.diff(cu_seqlens)
    padded = -(-lengths // multiple) * multiple
    parts: list[list[IntArray]] = [[] for _ in range(cp)]
    for start, length, size in zip(cu_seqlens, lengths, padded, strict=False):
        positions = np.full(size, PADDING, np.int64)
        positions[:length] = np.arange(start, start + length)
        if cp == 1:
            parts[0].append(positions)
            continue
        chunks = positions.reshape(2 * cp, -1)
        for rank in range(cp):
            parts[rank] += [chunks[rank], chunks[2 * cp - 1 - rank]]
    bounds = np.concatenate([[0], np.cumsum(padded)]).astype(np.int32)
    return Cut(bounds, tuple(np.concatenate([*part, np.zeros(0, np.int64)]) for part in parts))


def to_device(
    micro: MicroBatch, columns: dict[str, FloatArray], device: str, layout: Layout, cp_rank: int
) -> DeviceBatch:
    """Copy this rank's part of a micro-batch and of its columns (each [T, ..]) to a device."""
    cut = cut_sequences(micro.cu_seqlens, layout)
    source = cut.sources[cp_rank]
    here = source != PADDING

    def move(array: NDArray[np.generic], dtype: torch.dtype) -> Tensor:
        values = np.zeros((len(source), *array.shape[1:]), array.dtype)
        values[here] = array[source[here]]
        return torch.tensor(values, dtype=dtype, device=device)

    lengths = np.diff(micro.cu_seqlens)
    positions = np.arange(micro.num_tokens) - np.repeat(micro.cu_seqlens[:-1], lengths)
    return DeviceBatch(
        tokens=move(micro.tokens, torch.int64),
        positions=move(positions, torch.int64),
        labels=move(micro.labels, torch.int64),
        cu_seqlens=torch.tensor(cut.cu_seqlens, dtype=torch.int32, device=device),
        host_bounds=torch.from_numpy(cut.cu_seqlens),
        mask=move(micro.loss_mask, torch.float32),
        weights=move(micro.weights, torch.float32),
        rollout_logprobs=move(micro.rollout_logprobs, torch.float32),
        sequence=move(np.repeat(np.arange(len(lengths)), lengths), torch.int64),
        columns={name: move(column, torch.float32) for name, column in columns.items()},
        routing=None if micro.routing is None else _routing(micro.routing, source, device),
        margins=None if micro.margins is None else torch.tensor(micro.margins, dtype=torch.float32, device=device),
        desirable=None if micro.desirable is None else torch.tensor(micro.desirable, device=device),
    )


def _routing(routing: RoutingArray, source: IntArray, device: str) -> Tensor:
    values = np.full((len(source), routing.shape[1]), PADDING, routing.dtype)
    here = source != PADDING
    values[here] = routing[source[here]]
    return torch.tensor(values, device=device)


def joined_top(ids: Tensor, logprobs: Tensor) -> Tensor:
    """A column of the likeliest k entries of each token: [T, 2k + 1] float32, in which ids below 2^24 are exact.

    ids: [T, k] int64. logprobs: [T, k + 1], theirs and that of all other entries together.
    """
    return torch.cat([ids.float(), logprobs], dim=1)


def split_top(column: Tensor) -> tuple[Tensor, Tensor]:
    """`joined_top` undone: ids [T, k] int64, and log-probs [T, k + 1]."""
    k = column.shape[1] // 2
    return column[:, :k].long(), column[:, k:]


def filler(device: str, layout: Layout, columns: Mapping[str, Tensor]) -> DeviceBatch:
    """A batch of one token that counts for nothing: some schedules want a certain number of micro-batches.

    columns: those of another batch, whose names and widths it has.
    """
    zero = np.zeros(1, np.float32)
    one = MicroBatch(
        tokens=np.zeros(1, np.int64),
        labels=np.zeros(1, np.int64),
        cu_seqlens=np.array([0, 1], np.int32),
        loss_mask=zero,
        weights=zero,
        rollout_logprobs=zero,
        sample_index=np.zeros(1, np.int64),
        margins=np.zeros(0, np.float32),
        desirable=zero,
    )
    zeros = {name: np.zeros((1, *column.shape[1:]), np.float32) for name, column in columns.items()}
    return to_device(one, zeros, device, layout, 0)
