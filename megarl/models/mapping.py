"""Tensors between HF's form and Megatron's, as the rules say. Exact: no bit is lost in any direction."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.models.parts import Part
from megarl.models.rules import Source


def within(tensor: Tensor, source: Source) -> Tensor:
    """What a source is of its HF tensor: a view of it, all of it where it has no slot."""
    slot = source.slot
    if slot is None:
        return tensor if tensor.dim() else tensor.view(1)
    if slot.as_rows:
        return tensor.flatten(0, 1)[source.first_row : source.first_row + source.shape[0]]
    mine = tensor[slot.expert][..., slot.first :: slot.step]
    return mine.T if mine.dim() == 2 else mine


def take(held: Tensor, part: Part, source: int) -> Tensor:
    """What a rank's part holds of one HF tensor, rows in HF's order: a view where the rows are neighbours."""
    pieces = [held[run.at : run.at + run.stop - run.start] for run in part.of(source)]
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces) if pieces else held[:0]


def window(tensor: Tensor, part: Part, rows: slice) -> Tensor:
    """Rows of a whole HF tensor, of the columns that the part holds: a view."""
    return tensor[rows] if part.columns is None else tensor[rows, part.columns]


def put(tensor: Tensor, held: Tensor, part: Part, source: int) -> None:
    """Write what a rank's part holds of one HF tensor into the whole one, run by run: no row is copied twice."""
    for run in part.runs:
        if run.source == source:
            window(tensor, part, slice(run.start, run.stop)).copy_(held[run.at : run.at + run.stop - run.start])
