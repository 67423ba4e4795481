"""What a rank sends by broadcast, in FP8: the sender of a bucket quantises it once its tensors are whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megarl.models.config import ModelConfig
from megarl.models.fp8_quantize import DTYPE, quantize
from megarl.models.fp8_weights import quantised
from megarl.models.hf_fp8 import scale_name
from megarl.sync.outgoing import Outgoing
from megarl.sync.parcel import Parcel


class QuantizedWeights:
    """The `Outgoing` of another one, with the linears of layers in FP8, each followed by its scales."""

    def __init__(self, outgoing: Outgoing, config: ModelConfig) -> None:
        self._outgoing, self._scales = outgoing, quantised(config)
        self.parcels: Sequence[Parcel] = [announced(parcel, self._scales) for parcel in outgoing.parcels]

    def gather(self, number: int) -> list[Tensor]:
        """As `Outgoing` says."""
        gathered = self._outgoing.gather(number)
        if not gathered:
            return []
        found: list[Tensor] = []
        for name, tensor in zip(self._outgoing.parcels[number].names, gathered, strict=True):
            found += quantize(tensor) if name in self._scales else [tensor]
        return found

    def room(self, number: int) -> Tensor | None:
        """As `Outgoing` says."""
        return self._outgoing.room(number)


def announced(parcel: Parcel, scales: Mapping[str, tuple[int, int]]) -> Parcel:
    """A bucket as it is announced with its weights in FP8. scales: shapes, of the weights that are quantised."""
    names: list[str] = []
    dtypes: list[torch.dtype] = []
    shapes: list[tuple[int, ...]] = []
    for name, dtype, shape in zip(parcel.names, parcel.dtypes, parcel.shapes, strict=True):
        names.append(name)
        dtypes.append(DTYPE if name in scales else dtype)
        shapes.append(shape)
        if name in scales:
            names.append(scale_name(name))
            dtypes.append(torch.float32)
            shapes.append(scales[name])
    return replace(parcel, names=tuple(names), dtypes=tuple(dtypes), shapes=tuple(shapes))
