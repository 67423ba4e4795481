"""The buckets of a plan on one rank: what is in each, as every rank knows it, and this rank's part in putting it together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from megarl.models.hf_gather import Gatherer, Places, Wanted
from megarl.models.hf_pieces import Entry, lay_out
from megarl.sync.parcel import Parcel
from megarl.sync.peer_memory import PeerMemory
from megarl.sync.plan import SyncPlan, Trainer, staged_bytes
from megarl.sync.rooms import rooms


class Outgoing(Protocol):
    """What a rank sends by broadcast."""

    @property
    def parcels(self) -> Sequence[Parcel]:
        """All buckets, in the order in which every server takes them."""
        ...

    def gather(self, number: int) -> list[Tensor]:
        """The tensors of a bucket, on its sender; nothing elsewhere. Collective: every rank gathers every bucket in order.

        They are to be sent, or copied, before the second next of the buckets that this rank is a member of is gathered.
        """
        ...

    def room(self, number: int) -> Tensor | None:
        """Memory for a bucket that this rank helps to send, [`Parcel.room_bytes`] uint8, as long; None where there is none."""
        ...


class PlannedWeights:
    """The `Outgoing` of a model's weights, after a plan.

    peers: where ranks of a sender's node write what they hold of a bucket; collective, where its memory is not taken yet.
    """

    def __init__(self, gatherer: Gatherer, plan: SyncPlan, rank: int, peers: PeerMemory) -> None:
        self._gatherer, self._peers, self._rank = gatherer, peers, rank
        self._staged = staged_bytes(plan.bucket_bytes)
        self._wanted: list[list[Wanted]] = []
        self.parcels: list[Parcel] = []
        writers: dict[int, frozenset[int]] = {}
        for bucket in plan.buckets:
            [sender] = plan.assemblers(bucket)
            # The widest numbers first: end to end, each tensor begins where its dtype may.
            tensors = sorted(bucket.tensors, key=lambda tensor: -gatherer.dtype_of(tensor.name).itemsize)
            self._wanted.append([(tensor.name, plan.holders(tensor, sender)) for tensor in tensors])
            names = tuple(tensor.name for tensor in tensors)
            members = (sender, *plan.helpers(sender))
            dtypes, shapes = tuple(map(gatherer.dtype_of, names)), tuple(tensor.shape for tensor in tensors)
            self.parcels.append(Parcel(sender, members, names, dtypes, shapes))
            writers[sender] = writers.get(sender, frozenset()) | plan.neighbours(bucket, sender)
        writers = {sender: found for sender, found in writers.items() if found}
        self._laid = [_laid_out(parcel, wanted) for parcel, wanted in zip(self.parcels, self._wanted, strict=True)]
        self._rooms = rooms(self.parcels, self._laid, frozenset(writers))
        peers.take(self._rooms.sizes, writers)

    def gather(self, number: int) -> list[Tensor]:
        """As `Outgoing` says."""
        sender = self.parcels[number].sender
        memory, place = self._peers.of(sender), dict[str, Tensor]()
        if memory is not None:
            room = memory[self._rooms.starts[number][sender] :]
            place = {entry.name: entry.of(room) for entry in self._laid[number]}
        places = Places({sender: place}, {sender: self._peers.writers(sender)})
        return [tensor for _, tensor in self._gatherer.gather({sender: self._wanted[number]}, places, self._staged)]

    def room(self, number: int) -> Tensor | None:
        """As `Outgoing` says."""
        memory = self._peers.of(self._rank)
        return None if memory is None else memory[self._rooms.starts[number][self._rank] :]


def _laid_out(parcel: Parcel, wanted: Sequence[Wanted]) -> tuple[Entry, ...]:
    """What of a bucket is put together in its sender's memory: what others hold, and all of it where it travels end to end."""
    tensors = zip(parcel.names, parcel.shapes, parcel.dtypes, strict=True)
    if parcel.is_flattened:
        return lay_out(tensors, alignment=1)
    return lay_out(
        each for each, (_, holders) in zip(tensors, wanted, strict=True) if tuple(holders) != (parcel.sender,)
    )


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
        mine = {entry.name: entry.of(flat) for entry in self.buckets[number]} if self._rank in wanted else {}
        self._gatherer.gather(wanted, Places({self._rank: mine}), staged_bytes(self._plan.bucket_bytes))


def trainer_of(gatherer: Gatherer, nodes: tuple[int, ...]) -> Trainer:
    """The ranks that hold the weights, as a plan wants them. nodes: of every rank."""
    return Trainer(gatherer.config, gatherer.layout, nodes, gatherer.dtype.itemsize, gatherer.spec)
