"""A MicroBatch as tensors on a rank's device, with its columns, and columns back. Processes exchange numpy.

Context and sequence parallel want every sequence padded to a multiple of `Layout.sequence_multiple`, and context parallel
cuts each padded sequence in 2 x CP chunks of which rank r holds chunks r and 2 x CP - 1 - r (causal attention is then the
same work on every rank). Nobody outside of this module sees the padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.core.errors import MegarlError
from megarl.core.layout import Layout
from megarl.core.types import TEACHER_TOP, FloatArray, IntArray, MicroBatch, Picture, RoutingArray
from megarl.models.vision import Vision, png_size

PADDING = -1
Bounds = NDArray[np.int32]  # cu_seqlens


@dataclass(frozen=True)
class Images:
    """Those of a packed forward pass, and which of this rank's tokens are squares of them.

    pictures: in the order of their tokens. positions: [3, T of all context-parallel ranks] int64, each token's place in time,
    row and column within its sequence. rows: [n] int64, this rank's tokens that are squares; squares: [n] int64, which of all
    images'.
    """

    pictures: tuple[Picture, ...]
    positions: Tensor
    rows: Tensor
    squares: Tensor


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
    images: Images | None = None  # None where no sequence has any

    @property
    def num_tokens(self) -> int:
        """T, with padding."""
        return self.tokens.shape[0]

    def routing_of(self, num_layers: int, layout: Layout, tp_rank: int) -> Tensor | None:
        """`routing` of the tokens that a tensor-parallel rank's routers see: [T or T / tp, layers, k]."""
        if self.routing is None:
            return None
        routing: Tensor = self.routing.unflatten(1, (num_layers, -1))
        return routing.chunk(layout.tp)[tp_rank] if layout.sequence_parallel else routing

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
    micro: MicroBatch,
    columns: dict[str, FloatArray],
    device: str,
    layout: Layout,
    cp_rank: int,
    vision: Vision | None = None,
) -> DeviceBatch:
    """Copy this rank's part of a micro-batch and of its columns (each [T, ..]) to a device.

    vision: of the model. Raises MegarlError where it has none and there are images, or where these are not those of the tokens.
    """
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
        images=_images(micro, cut.cu_seqlens, source, vision, device) if any(micro.images or ()) else None,
    )


def _images(micro: MicroBatch, bounds: Bounds, source: IntArray, vision: Vision | None, device: str) -> Images:
    """bounds: of the padded sequences. source: as `Cut` has it, of this rank."""
    assert micro.images is not None
    if vision is None:
        raise MegarlError("A micro-batch has images, and the model sees none.")
    positions = np.zeros((3, bounds[-1]), np.int64)
    square = np.full(micro.num_tokens, PADDING, np.int64)
    for sequence, (start, stop) in enumerate(itertools.pairwise(micro.cu_seqlens)):
        tokens, first = micro.tokens[start:stop], bounds[sequence]
        try:
            sizes = [_size(picture) for picture in micro.images[sequence]]
            positions[:, first : first + len(tokens)] = vision.positions(tokens, sizes)
            square[start:stop][vision.squares(tokens, sizes)] = 0
        except ValueError as error:
            raise MegarlError(f"Sequence {sequence} of a micro-batch and its images do not agree: {error}.") from error
    square[square == 0] = np.arange((square == 0).sum())
    mine = np.where(source == PADDING, PADDING, square[source])
    rows = np.flatnonzero(mine != PADDING)
    pictures = tuple(itertools.chain.from_iterable(micro.images))
    return Images(pictures, *(torch.from_numpy(each).to(device) for each in (positions, rows, mine[rows])))


def _size(picture: Picture) -> tuple[int, int]:
    """Width and height. Raises ValueError for bytes that are no PNG."""
    return png_size(picture) if isinstance(picture, bytes) else (picture.width, picture.height)


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
