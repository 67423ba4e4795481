"""Whole tensors of a rule from HF's form to parts of Megatron's, and back: what ranks do piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megarl.models.mapping import put, within
from megarl.models.parts import part_of
from megarl.models.rules import Rule


def merge(rule: Rule, tensors: Sequence[Tensor], index: int = 0, count: int = 1) -> Tensor:
    """The rule's whole HF tensors -> part `index` of `count` of the Megatron tensor; by default all of it, unpadded."""
    part = part_of(rule, index, count)
    result = tensors[0].new_zeros(part.shape)
    for run in part.runs:
        rows = within(tensors[run.source], rule.sources[run.source])[run.start : run.stop]
        result[run.at : run.at + run.stop - run.start] = rows if part.columns is None else rows[:, part.columns]
    return result


def split(rule: Rule, parts: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """All parts of the Megatron tensor, in order -> named HF tensors, or what are slots of these, without padding."""
    found = []
    for index, source in enumerate(rule.sources):
        tensor = parts[0].new_empty(source.shape)
        for number, held in enumerate(parts):
            part = part_of(rule, number, len(parts))
            put(tensor, held, part, index)
        found.append((source.name, tensor.view(()) if source.is_scalar else tensor))
    return found
