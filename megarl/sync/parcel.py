"""A bucket of a broadcast as it is announced, and as it travels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megarl.models.hf_pieces import Entry, lay_out, size_of

# Tensors of this size on average are broadcast one by one: nobody copies them end to end, or apart again.
LARGE_BYTES = 2**20
# gloo broadcasts these, but no eight-bit floats.
APART = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Parcel:
    """A bucket as it is announced. sender: the rank that sends it. members: that rank, and those that help it to send."""

    sender: int
    members: tuple[int, ...]
    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def nbytes(self) -> int:
        """Of all tensors."""
        sizes = zip(self.shapes, self.dtypes, strict=True)
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in sizes)

    @property
    def is_flattened(self) -> bool:
        """Whether its tensors travel end to end, as bytes; else each by itself."""
        return self.nbytes < LARGE_BYTES * len(self.names) or not set(self.dtypes).issubset(APART)

    @cached_property
    def room_bytes(self) -> int:
        """What `within` needs."""
        return self.nbytes if self.is_flattened else size_of(self._laid_out)

    def within(self, flat: Tensor) -> list[Tensor]:
        """Memory to receive it in, as it travels. flat: [room_bytes] uint8, or more."""
        return [flat[: self.nbytes]] if self.is_flattened else [entry.of(flat) for entry in self._laid_out]

    @property
    def _laid_out(self) -> tuple[Entry, ...]:
        return lay_out(zip(self.names, self.shapes, self.dtypes, strict=True))
