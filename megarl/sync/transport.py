"""How weights travel to the servers: the one interface of all transports, and which of them a run takes.

broadcast works between any two nodes. shared_memory needs the model's first copy and all servers on one node, and is faster
there: ranks write side by side, and no byte goes through a socket. disk needs nothing but a folder that ranks and servers see:
ranks write a version, and each server's own process beside it fetches that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import torch.distributed as dist

from megarl.core.errors import UserError
from megarl.core.platform import Platform
from megarl.models.hf_gather import Gatherer
from megarl.serving.client import ServerEndpoint
from megarl.sync.adapters import AdapterSender
from megarl.sync.broadcast import BroadcastSender
from megarl.sync.device_segment import DeviceSegment
from megarl.sync.disk import DiskSender
from megarl.sync.memory import DeviceMemory, Memory, NodeMemory, OnDevice, Pieces
from megarl.sync.outgoing import Outgoing, PlannedPieces, PlannedWeights, trainer_of
from megarl.sync.plan import Receiver, SyncPlan, plan_sync, planned_bytes
from megarl.sync.quantized import QuantizedWeights
from megarl.sync.ring import bucket_limit
from megarl.sync.segments import Segment
from megarl.sync.session import SyncReport
from megarl.sync.shared_memory import SharedMemorySender
from megarl.sync.store import Store

TransportName = Literal["broadcast", "shared_memory", "disk", "adapters"]

MIB = 2**20
GLOO_BUCKET_BYTES = 64 * MIB


class Weights(Protocol):
    """What a transport may ask a rank for. Every rank is asked the same."""

    def gatherer(self) -> AbstractContextManager[Gatherer]:
        """Brings whole tensors together on any rank."""
        ...

    def pieces(self, bucket_bytes: int) -> AbstractContextManager[Pieces]:
        """What this rank writes into memory that it shares."""
        ...

    def export_adapters(self, folder: Path) -> None:
        """Write the LoRA adapters in PEFT's format. Collective; raises MegarlError where there are none."""
        ...


class Transport(Protocol):
    """The sending end on one rank. Every rank makes one, and makes the same calls."""

    def send(
        self, weights: Weights, version: int, servers: Sequence[ServerEndpoint], *, flush_cache: bool = True
    ) -> SyncReport | None:
        """Send all weights to all servers and give them the version; the report is rank 0's, None elsewhere.

        flush_cache: servers forget what they computed with the old weights; False for those that hold requests in place.
        A server's failure is no exception: the report names it, and the others have the weights. Over the disk it names nobody:
        the servers fetch what was written (`Sending.fetched`).
        """
        ...

    def leave(self, servers: Sequence[ServerEndpoint], deadline_s: float) -> dict[str, str]:
        """Close, and have servers that go on without this run give up what they hold of it; who did not, and why. On rank 0."""
        ...

    def close(self) -> None:
        """Give back what is kept from sync to sync."""
        ...


class Broadcast:
    """The `Transport` over torch.distributed: who holds a part of the model sends it. nodes: of every rank.

    quantized: in FP8, as servers hold it then.
    """

    def __init__(
        self, sender: BroadcastSender, bucket_bytes: int, nodes: tuple[int, ...], *, quantized: bool = False
    ) -> None:
        self.sender = sender
        self._bucket_bytes, self._nodes, self._quantized = bucket_bytes, nodes, quantized
        self._plan: SyncPlan | None = None

    def send(
        self, weights: Weights, version: int, servers: Sequence[ServerEndpoint], *, flush_cache: bool = True
    ) -> SyncReport | None:
        """As the interface says."""
        with weights.gatherer() as gatherer:
            trainer = trainer_of(gatherer, self._nodes)
            # gloo would copy what helpers carry through their own memory, on the same processors; and what a server receives in
            # pieces of many megabytes is memory that it has to take anew each time.
            helped = self.sender.backend_for(servers) == "nccl"
            bucket_bytes = planned_bytes(self._bucket_bytes, trainer.layout)
            bucket_bytes = bucket_bytes if helped else min(bucket_bytes, GLOO_BUCKET_BYTES)
            if self._plan is None or (self._plan.trainer, self._plan.bucket_bytes) != (trainer, bucket_bytes):
                self._plan = plan_sync(trainer, (), "broadcast", bucket_bytes)
            outgoing = _outgoing(gatherer, self._plan, helped=helped, quantized=self._quantized)
            return self.sender.send(outgoing, version, servers, flush_cache=flush_cache)

    def leave(self, servers: Sequence[ServerEndpoint], deadline_s: float) -> dict[str, str]:
        """As the interface says."""
        return self.sender.leave(servers, deadline_s)

    def close(self) -> None:
        """Leave the group with the servers."""
        self.sender.close()


class _LeavesNothing:
    """Of transports by which servers hold nothing of the run once they have loaded the weights."""

    sender: SharedMemorySender | DiskSender

    def leave(self, servers: Sequence[ServerEndpoint], deadline_s: float) -> dict[str, str]:
        """As the interface says."""
        self.close()
        return {}

    def close(self) -> None:
        """Give back the memory, or forget what was written last."""
        self.sender.close()


class SharedMemory(_LeavesNothing):
    """The `Transport` over memory of a node that ranks and servers share."""

    def __init__(self, sender: SharedMemorySender, bucket_bytes: int) -> None:
        self.sender: SharedMemorySender = sender
        self._bucket_bytes = bucket_bytes

    def send(
        self, weights: Weights, version: int, servers: Sequence[ServerEndpoint], *, flush_cache: bool = True
    ) -> SyncReport | None:
        """As the interface says."""
        with weights.pieces(bucket_limit(self._bucket_bytes)) as pieces:
            return self.sender.send(pieces, version, servers, flush_cache=flush_cache)


class SharedDevices(_LeavesNothing):
    """The `Transport` over memory of devices that servers share with ranks: the rank beside each puts whole buckets together.

    receivers: the servers, each with the ranks beside it. nodes: of every rank.
    """

    def __init__(
        self,
        sender: SharedMemorySender,
        rank: int,
        bucket_bytes: int,
        nodes: tuple[int, ...],
        receivers: tuple[Receiver, ...],
    ) -> None:
        self.sender: SharedMemorySender = sender
        self._rank, self._bucket_bytes, self._nodes, self._receivers = rank, bucket_bytes, nodes, receivers
        self._plan: SyncPlan | None = None

    def send(
        self, weights: Weights, version: int, servers: Sequence[ServerEndpoint], *, flush_cache: bool = True
    ) -> SyncReport | None:
        """As the interface says."""
        with weights.gatherer() as gatherer:
            trainer = trainer_of(gatherer, self._nodes)
            if self._plan is None or self._plan.trainer != trainer:
                self._plan = plan_sync(trainer, self._receivers, "shared_memory", bucket_limit(self._bucket_bytes))
            pieces = PlannedPieces(gatherer, self._plan, self._rank)
            return self.sender.send(pieces, version, servers, flush_cache=flush_cache)


class Disk(_LeavesNothing):
    """The `Transport` over a folder that ranks and servers see: who holds a part of the model writes it. nodes: of every rank.

    quantized: in FP8, as servers hold it then.
    """

    def __init__(
        self, sender: DiskSender, bucket_bytes: int, nodes: tuple[int, ...], *, quantized: bool = False
    ) -> None:
        self.sender: DiskSender = sender
        self._bucket_bytes, self._nodes, self._quantized = bucket_bytes, nodes, quantized
        self._plan: SyncPlan | None = None

    def send(
        self, weights: Weights, version: int, servers: Sequence[ServerEndpoint], *, flush_cache: bool = True
    ) -> SyncReport | None:
        """As the interface says; no server takes part."""
        with weights.gatherer() as gatherer:
            trainer = trainer_of(gatherer, self._nodes)
            if self._plan is None or self._plan.trainer != trainer:
                self._plan = plan_sync(trainer, (), "disk", planned_bytes(self._bucket_bytes, trainer.layout))
            files = [self._plan.file(bucket) for bucket in self._plan.buckets]
            outgoing = _outgoing(gatherer, self._plan, helped=False, quantized=self._quantized)
            return self.sender.write(outgoing, files, version)


def _outgoing(gatherer: Gatherer, plan: SyncPlan, *, helped: bool, quantized: bool) -> Outgoing:
    planned = PlannedWeights(gatherer, plan, helped=helped)
    return QuantizedWeights(planned, gatherer.config) if quantized else planned


@dataclass(frozen=True)
class Versions:
    """Where weight versions go over the disk. whole_bytes: of the weights.

    in_place: servers read them where they are written, so that all of them are whole; else every server's node puts together
    what changed. all_files: servers load what did not change as well.
    """

    store: Store
    whole_bytes: int
    in_place: bool
    all_files: bool = False


@dataclass(frozen=True)
class Sending:
    """What the ranks are told of how to send. writers: the ranks that hold the model's first copy. nodes: of every rank, by
    number.

    registry: of the shared memory that is removed with the run, on the writers' node. bucket_bytes: most that is sent at once,
    but for a tensor that is larger. timeout_s: of one attempt. versions: where they go over the disk. quantized: linears of
    layers in FP8. adapters: the folder of LoRA adapters that are sent alone. beside: the servers, each with the ranks on its
    devices, where they share the devices' memory.
    """

    transport: TransportName
    writers: tuple[int, ...]
    nodes: tuple[int, ...]
    registry: Path
    bucket_bytes: int
    timeout_s: float
    versions: Versions | None = None
    quantized: bool = False
    adapters: Path | None = None
    beside: tuple[Receiver, ...] = ()

    @property
    def fetched(self) -> Versions | None:
        """Where servers are to fetch what the ranks wrote; None where the ranks send it to them."""
        return self.versions if self.transport == "disk" else None


def make_transport(
    sending: Sending,
    *,
    rank: int,
    host: str,
    platform: Platform,
    control: dist.ProcessGroup | None,
) -> Transport:
    """The sending end of one rank; the rest as `BroadcastSender` takes it."""
    if sending.adapters is not None:
        return AdapterSender(rank=rank, folder=sending.adapters, timeout_s=sending.timeout_s)
    if sending.transport == "broadcast":
        sender = BroadcastSender(
            rank=rank,
            host=host,
            device=platform.device,
            backend=platform.backend,
            timeout_s=sending.timeout_s,
            control=control,
        )
        return Broadcast(sender, sending.bucket_bytes, sending.nodes, quantized=sending.quantized)
    if sending.transport == "disk":
        assert sending.versions is not None, sending
        store, whole_bytes = sending.versions.store, sending.versions.whole_bytes
        deltas = not sending.versions.in_place
        writer = DiskSender(rank=rank, store=store, whole_bytes=whole_bytes, deltas=deltas, control=control)
        return Disk(writer, sending.bucket_bytes, sending.nodes, quantized=sending.quantized)
    memory: Memory = NodeMemory(rank=rank, writers=sending.writers, registry=sending.registry, control=control)
    if sending.beside:
        make = partial(_device_memory, platform=platform, registry=sending.registry)
        hosts = {receiver.name: receiver.ranks for receiver in sending.beside}
        memory = DeviceMemory(rank=rank, hosts=hosts, make=make, control=control)
    shared = SharedMemorySender(
        rank=rank,
        memory=memory,
        bucket_bytes=sending.bucket_bytes,
        timeout_s=sending.timeout_s,
        control=control,
    )
    if sending.beside:
        return SharedDevices(shared, rank, sending.bucket_bytes, sending.nodes, sending.beside)
    return SharedMemory(shared, sending.bucket_bytes)


def _device_memory(num_bytes: int, platform: Platform, registry: Path) -> OnDevice:
    """Memory of this rank's device; the node's, where processes stand for devices."""
    if platform.has_device_memory:
        return DeviceSegment(num_bytes, platform.device)
    return Segment.make(num_bytes, registry)


@dataclass(frozen=True)
class Where:
    """What decides on a transport. writers, servers: the nodes of the ranks that hold the first copy, and of the servers.

    takes_memory: whether servers there load from the host's memory as fast as from any other. external: somebody else started
    the servers. needed_bytes: shared memory that is needed; free_bytes: what the node has, None where it cannot be seen from
    here. quantized: weights are sent in FP8. beside: devices have memory of their own, and every device of a server has a rank
    that holds weights.
    """

    writers: Collection[str]
    servers: Collection[str]
    takes_memory: bool
    needed_bytes: int
    free_bytes: int | None
    external: bool = False
    quantized: bool = False
    beside: bool = False


def choose(wanted: Literal["auto", "broadcast", "shared_memory", "disk"], where: Where) -> tuple[TransportName, str]:
    """A transport, and why it is this one. Raises UserError where the one that is wanted cannot work."""
    if wanted in ("broadcast", "disk"):
        return wanted, "sync.transport asks for it"
    against = _against_shared_memory(where)
    if not against:
        auto = f"the model's first copy and all servers are on {next(iter(where.writers))}"
        auto = "every device of a server has a rank that holds weights" if where.beside else auto
        return "shared_memory", auto if wanted == "auto" else "sync.transport asks for it"
    if wanted == "auto":
        return "broadcast", against
    raise UserError(
        f"sync.transport is shared_memory, but {against}. Set sync.transport to auto or broadcast, which works everywhere."
    )


def _against_shared_memory(where: Where) -> str:
    """Why shared memory is not to be taken; nothing where it is."""
    if where.quantized or where.external:
        by_rows = "rollout.quantization needs each weight whole, and ranks write their own rows into shared memory"
        elsewhere = "the servers of rollout.servers.urls are not this run's own, and may be on any machine"
        return by_rows if where.quantized else elsewhere
    if not where.takes_memory:
        alone = "devices here have memory of their own, and no rank that holds weights is on every device of a server"
        return "" if where.beside else alone
    writers, servers = set(where.writers), set(where.servers)
    if len(writers) > 1:
        return f"the ranks that hold the model's first copy are on several nodes ({', '.join(sorted(writers))})"
    if others := sorted(servers - writers):
        return f"servers are on other nodes ({', '.join(others)}) than the ranks ({', '.join(sorted(writers))})"
    if where.free_bytes is not None and where.free_bytes < where.needed_bytes:
        return (
            f"/dev/shm has {where.free_bytes / MIB:,.0f} MiB free and {where.needed_bytes / MIB:,.0f} are needed (docker run "
            "--shm-size makes it larger)"
        )
    return ""
