"""Weights under HF names in buckets that several ranks fill side by side: each writes the rows that it holds into place.

Nothing is gathered: who can write into a bucket's memory needs nobody else. `hf_gather` is for one rank that
has to have whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module

from megarl.core.layout import Layout
from megarl.models.config import ModelConfig
from megarl.models.hf_weights import Held, Value, layer_spec, planned, units_of
from megarl.models.mapping import put
from megarl.models.parts import ALIGNMENT, Dealing
from megarl.models.rules import rules


@dataclass(frozen=True)
class Entry:
    """A whole HF tensor in a bucket: it begins at byte `start`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def of(self, flat: Tensor) -> Tensor:
        """The tensor within its bucket: a view. flat: [bytes] uint8."""
        return flat[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


def lay_out(
    tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]], alignment: int = ALIGNMENT
) -> tuple[Entry, ...]:
    """Tensors end to end, each at a multiple of `alignment` bytes."""
    entries: list[Entry] = []
    start = 0
    for name, shape, dtype in tensors:
        entries.append(Entry(name, shape, dtype, start))
        start += -(-entries[-1].nbytes // alignment) * alignment
    return tuple(entries)


def size_of(bucket: Sequence[Entry]) -> int:
    """Bytes of a bucket's memory."""
    return bucket[-1].start + bucket[-1].nbytes


class Pieces:
    """One rank's part in filling all buckets. Every rank of the layout plans the same ones, without asking the others.

    value: what to export in a parameter's place, as `Gatherer` takes it. dtypes: of HF tensors that are
    to be in another dtype than the value.
    """

    def __init__(
        self,
        chunks: Sequence[Module],
        config: ModelConfig,
        layout: Layout,
        rank: int,
        bucket_bytes: int,
        value: Value | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        self._held, self._rank = Held(chunks, layout, rank, value), rank
        self._dealing = Dealing(config, layout)
        units = units_of(rules(config, layer_spec(chunks)))
        # Nobody loads while the first one is written.
        self._units = list(planned(units, self._held.dtype, bucket_bytes, first_bytes=bucket_bytes // 4))
        given = dtypes or {}
        self.buckets = tuple(
            lay_out((unit.name, unit.shape, given.get(unit.name, unit.dtype(self._held.dtype))) for unit in bucket)
            for bucket in self._units
        )

    def write(self, number: int, flat: Tensor) -> None:
        """Write this rank's rows of bucket `number` into its memory. flat: [bytes] uint8, of `size_of` bytes or more.

        Raises MegarlError where the model does not hold what a rule promises.
        """
        for unit, entry in zip(self._units[number], self.buckets[number], strict=True):
            holders = unit.holders(self._dealing)
            for holder, share in zip(holders, unit.shares(len(holders)), strict=True):
                if holder == self._rank:
                    put(share.of(entry.of(flat)), self._held.value(share.rule, share.part), share.part, share.source)
