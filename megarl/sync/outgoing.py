"""The buckets of a plan on one rank: what is in each, as every rank knows it, and this rank's part in putting it together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from megarl.models.hf_gather import Gatherer
from megarl.models.hf_pieces import lay_out
from megarl.sync.plan import SyncPlan, Trainer, staged_bytes

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

    def empty(self, device: torch.device) -> list[Tensor]:
        """Memory to receive it in, as it travels."""
        if self.is_flattened:
            return [torch.empty(self.nbytes, dtype=torch.uint8, device=device)]
        return [
            torch.empty(shape, dtype=dtype, device=device)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]


class Outgoing(Protocol):
    """What a rank sends by broadcast."""

    @property
    def parcels(self) -> Sequence[Parcel]:
        """All buckets, in the order in which every server takes them."""
        ...

    def gather(self, number: int) -> list[Tensor]:
        """The tensors of a bucket, on its sender; nothing elsewhere. Collective: every rank gathers every bucket in order."""
        ...


class PlannedWeights:
    """The `Outgoing` of a model's weights, after a plan. helped: whether the ranks of a sender's node help it to send."""

    def __init__(self, gatherer: Gatherer, plan: SyncPlan, *, helped: bool) -> None:
        self._gatherer, self._plan, self._staged = gatherer, plan, staged_bytes(plan.bucket_bytes)
        self.parcels = [
            Parcel(
                sender,
                (sender, *plan.helpers(sender)) if helped else (sender,),
                names := tuple(tensor.name for tensor in bucket.tensors),
                tuple(map(gatherer.dtype_of, names)),
                tuple(tensor.shape for tensor in bucket.tensors),
            )
            for bucket in plan.buckets
            for sender in plan.assemblers(bucket)
        ]

    def gather(self, number: int) -> list[Tensor]:
        """As `Outgoing` says."""
        bucket, parcel = self._plan.buckets[number], self.parcels[number]
        wanted = [(tensor.name, self._plan.holders(tensor, parcel.sender)) for tensor in bucket.tensors]
        return [tensor for _, tensor in self._gatherer.gather({parcel.sender: wanted}, staged_bytes=self._staged)]


class PlannedPieces:
    """Buckets that every rank beside a server's device puts together for itself, after a plan of shared memory."""

    def __init__(self, gatherer: Gatherer, plan: SyncPlan, rank: int) -> None:
        self._gatherer, self._plan, self._rank = gatherer, plan, rank
        self.buckets = [
            lay_out((tensor.name, tensor.shape, gatherer.dtype_of(tensor.name)) for tensor in bucket.tensors)
            for bucket in plan.buckets
        ]

    def write(self, number: int, flat: Tensor) -> None:
        """Write a bucket, where a server's device is beside this rank; elsewhere only give the others what they need."""
        bucket = self._plan.buckets[number]
        wanted = {
            host: [(tensor.name, self._plan.holders(tensor, host)) for tensor in bucket.tensors]
            for host in self._plan.hosts
        }
        into = {entry.name: entry.of(flat) for entry in self.buckets[number]} if self._rank in wanted else None
        self._gatherer.gather(wanted, into, staged_bytes(self._plan.bucket_bytes))


def trainer_of(gatherer: Gatherer, nodes: tuple[int, ...]) -> Trainer:
    """The ranks that hold the weights, as a plan wants them. nodes: of every rank."""
    return Trainer(gatherer.config, gatherer.layout, nodes, gatherer.dtype.itemsize, gatherer.spec)
