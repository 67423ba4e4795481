"""Who sends which bytes of the weights to whom, and in which order: one table, made from layouts alone.

Without torch and without communication: every rank makes the same plan by itself. What sends reads it; price.py says how
long it takes. How tensors are assigned to senders, and senders take turns, is in senders.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from megarl.core.errors import UserError
from megarl.core.layout import Layout, dense_rank, expert_rank
from megarl.models.config import ModelConfig
from megarl.models.rules import LayerSpec
from megarl.sync.senders import MOST_SENDERS, Tensor, interleaved, mixed, packed, streams, units_of

# Of a bucket, what a rank receives at once in columns, beside the bucket that it puts together; and at most.
STAGED_SHARE = 8
MOST_STAGED_BYTES = 16 * 2**20
# What a server receives by gloo in pieces of many megabytes is memory that it has to take anew each time.
GLOO_BUCKET_BYTES = 64 * 2**20
# broadcast: to servers elsewhere. shared_memory: to servers on the ranks' devices, or nodes. disk: files of safetensors.
Transport = Literal["broadcast", "shared_memory", "disk"]


@dataclass(frozen=True)
class Trainer:
    """The ranks that hold the weights. nodes: of every rank. bytes_each: of one weight; mapped buffers have 4."""

    config: ModelConfig
    layout: Layout
    nodes: tuple[int, ...]
    bytes_each: int = 2
    spec: LayerSpec = "transformer_engine"

    def __post_init__(self) -> None:
        assert len(self.nodes) == self.layout.world_size, (self.nodes, self.layout.world_size)

    def ranks_on(self, node: int) -> tuple[int, ...]:
        """The ranks of a node."""
        return tuple(rank for rank, each in enumerate(self.nodes) if each == node)


@dataclass(frozen=True)
class Receiver:
    """One server. nodes: of each of its devices, as many as its tp. ranks: the one beside it on each device; () is none."""

    name: str
    nodes: tuple[int, ...]
    ranks: tuple[int, ...] = ()

    @property
    def tp(self) -> int:
        """Devices of the server."""
        return len(self.nodes)


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together, flattened. sender: the rank that puts them together; None: every device's own rank."""

    number: int
    sender: int | None
    tensors: tuple[Tensor, ...]
    nbytes: int


@dataclass(frozen=True)
class Row:
    """A line of the table: this rank's bytes of this tensor go to `sender`, and from there in the bucket to the receivers."""

    bucket: int
    tensor: str
    part: int
    rank: int
    nbytes: int
    sender: int
    receivers: tuple[str, ...]


@dataclass(frozen=True)
class SyncPlan:
    """All buckets, in the one order in which every server takes them. helped: see `helpers`."""

    transport: Transport
    trainer: Trainer
    receivers: tuple[Receiver, ...]
    bucket_bytes: int
    buckets: tuple[Bucket, ...]
    helped: bool
    _near: dict[tuple[tuple[int, int | None, int, int], int], tuple[int, ...]] = field(
        default_factory=dict, compare=False
    )

    @property
    def nbytes(self) -> int:
        """Bytes of the model, counted once."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def num_tensors(self) -> int:
        """HF tensors of the model."""
        return sum(len(bucket.tensors) for bucket in self.buckets)

    @cached_property
    def sent_bytes(self) -> dict[int, int]:
        """Sender -> bytes that it sends, once however many receive; in shared memory what each device's rank hands over."""
        found = Counter[int]()
        for bucket in self.buckets:
            for sender in self.assemblers(bucket):
                found[sender] += bucket.nbytes
        return dict(sorted(found.items()))

    def assemblers(self, bucket: Bucket) -> tuple[int, ...]:
        """The ranks that put a bucket together: its sender; with shared memory the rank beside each server's device."""
        return self.hosts if bucket.sender is None else (bucket.sender,)

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        """The ranks beside the servers' devices; where a server has none of its own, the first rank of each of its nodes."""
        found: set[int] = set()
        for receiver in self.receivers:
            found.update(receiver.ranks or (self.trainer.ranks_on(node)[0] for node in receiver.nodes))
        return tuple(sorted(found))

    def helpers(self, sender: int) -> tuple[int, ...]:
        """The other ranks of a sender's node. They join its group, so that the links of the whole node carry each bucket.

        Nobody with gloo, which would copy what they carry through their own memory, on the same processors.
        """
        if not self.helped:
            return ()
        return tuple(rank for rank in self.trainer.ranks_on(self.trainer.nodes[sender]) if rank != sender)

    def holders(self, tensor: Tensor, near: int) -> tuple[int, ...]:
        """The rank that gives each part to the rank `near`: itself, else the nearest, first on its node."""
        key = tensor.held, near
        if key not in self._near:
            layout, nodes = self.trainer.layout, self.trainer.nodes
            self._near[key] = tuple(
                min(
                    _copies(layout, tensor, part),
                    key=lambda rank: (nodes[rank] != nodes[near], abs(rank - near), rank),
                )
                for part in range(len(tensor.parts))
            )
        return self._near[key]

    def neighbours(self, bucket: Bucket, near: int) -> frozenset[int]:
        """The other ranks of the node of rank `near` that give it parts of a bucket: they can write into its memory."""
        nodes, alike = self.trainer.nodes, {tensor.held: tensor for tensor in bucket.tensors}
        found = {rank for tensor in alike.values() for rank in self.holders(tensor, near)} - {near}
        return frozenset(rank for rank in found if nodes[rank] == nodes[near])

    def contributions(self, bucket: Bucket, near: int) -> dict[int, int]:
        """Rank -> bytes that it gives the rank `near` of a bucket."""
        found = Counter[int]()
        for tensor in bucket.tensors:
            for rank, nbytes in zip(self.holders(tensor, near), tensor.parts, strict=True):
                found[rank] += nbytes
        return {rank: nbytes for rank, nbytes in found.items() if nbytes}

    def rows(self) -> Iterator[Row]:
        """The whole table, bucket by bucket; with shared memory once for each device's rank."""
        names = tuple(receiver.name for receiver in self.receivers)
        for bucket in self.buckets:
            for sender in self.assemblers(bucket):
                to = names if bucket.sender is not None else self.served(sender)
                for tensor in bucket.tensors:
                    holders = self.holders(tensor, sender)
                    for part, (rank, nbytes) in enumerate(zip(holders, tensor.parts, strict=True)):
                        if nbytes:
                            yield Row(bucket.number, tensor.name, part, rank, nbytes, sender, to)

    def served(self, host: int) -> tuple[str, ...]:
        """The servers that take what a rank hands over in shared memory."""
        node = self.trainer.nodes[host]
        return tuple(
            each.name
            for each in self.receivers
            if (host in each.ranks if each.ranks else node in each.nodes and host == self.trainer.ranks_on(node)[0])
        )

    def file(self, bucket: Bucket) -> str:
        """The file that a bucket's sender writes, where the transport is the disk."""
        return f"model-{bucket.number + 1:05d}-of-{len(self.buckets):05d}.safetensors"


def plan_sync(
    trainer: Trainer,
    receivers: tuple[Receiver, ...],
    transport: Transport,
    bucket_bytes: int,
    *,
    most_senders: int = MOST_SENDERS,
    helped: bool = True,
) -> SyncPlan:
    """The plan of a sync; the same on every rank.

    Broadcast and disk: every pipeline stage and every expert-parallel rank sends its own tensors, and within a
    tensor-parallel group senders take turns by bytes. most_senders: beyond so many the ranks of a node share a sender, for
    each is a group that every server joins. Shared memory: every device's rank puts each bucket together for the server
    beside it, so that buckets mix the tensors of all ranks, and each gives about the same. helped: whether the ranks of a
    sender's node help it to broadcast, as they do over NCCL.

    Raises UserError where a server that is to take shared memory is on a node without ranks.
    """
    units = units_of(trainer.config, trainer.layout, trainer.spec, trainer.bytes_each)
    order: Sequence[tuple[int | None, tuple[Tensor, ...]]]
    if transport == "shared_memory":
        _check_shared(trainer, receivers)
        order = [(None, tensors) for tensors in packed(mixed(units), bucket_bytes)]
    else:
        most = trainer.layout.world_size if transport == "disk" else most_senders
        order = interleaved(streams(units, trainer.layout, trainer.nodes, most), bucket_bytes)
    buckets = tuple(
        Bucket(number, sender, tensors, sum(tensor.nbytes for tensor in tensors))
        for number, (sender, tensors) in enumerate(order)
    )
    return SyncPlan(transport, trainer, receivers, bucket_bytes, buckets, helped and transport == "broadcast")


def staged_bytes(bucket_bytes: int) -> int:
    """Bytes of columns that arrive at once while such a bucket is put together: they have memory of their own until they do."""
    return max(1, min(bucket_bytes // STAGED_SHARE, MOST_STAGED_BYTES))


def broadcast_bytes(bucket_bytes: int, *, helped: bool) -> int:
    """The size of the buckets of a broadcast, before `planned_bytes`. helped: over NCCL; else by gloo."""
    return bucket_bytes if helped else min(bucket_bytes, GLOO_BUCKET_BYTES)


def planned_bytes(bucket_bytes: int, layout: Layout, *, quantized: bool = False) -> int:
    """The size of the buckets of a broadcast, or of files, such that two and what arrives in columns take two `bucket_bytes`.

    quantized: the two stay where they are while a third is made of one of them, which is then sent.
    """
    is_cut = max(layout.tp, layout.etp) > 1
    bucket_bytes = bucket_bytes * 2 // 3 if quantized and is_cut else bucket_bytes
    return max(1, bucket_bytes - -(-staged_bytes(bucket_bytes) // 2)) if is_cut else bucket_bytes


def _copies(layout: Layout, tensor: Tensor, part: int) -> list[int]:
    """The ranks that hold a part of a tensor, in all copies of the model."""
    pp, ep = tensor.stage, tensor.ep
    num_parts = len(tensor.parts)
    if tensor.experts:
        # Each expert-parallel rank has as many, one behind the other; of those who share an expert each has one by turns.
        ep, part = divmod(part, num_parts // layout.ep)
        num_parts, part = layout.etp, part % layout.etp
    if ep is not None:
        parts = [part] if num_parts > 1 else range(layout.etp)
        return [expert_rank(layout, etp=etp, ep=ep, edp=edp, pp=pp) for edp in range(layout.edp) for etp in parts]
    # What tensor parallel does not cut is whole on all of its ranks.
    parts = [part] if len(tensor.parts) > 1 else range(layout.tp)
    copies = ((dp, cp) for dp in range(layout.dp) for cp in range(layout.cp))
    return [dense_rank(layout, tp=tp, cp=cp, dp=dp, pp=pp) for dp, cp in copies for tp in parts]


def _check_shared(trainer: Trainer, receivers: tuple[Receiver, ...]) -> None:
    here = set(trainer.nodes)
    apart = [receiver.name for receiver in receivers if not here.issuperset(receiver.nodes)]
    if apart:
        raise UserError(
            f"Shared memory reaches servers on the trainer's own nodes, and {', '.join(apart)} "
            f"{'is' if len(apart) == 1 else 'are'} on others: send to them by broadcast."
        )
