"""How weights travel to the servers: the one interface of all transports. Which of them a run takes: sending.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from megarl.core.platform import Platform
from megarl.models.hf_gather import Gatherer
from megarl.serving.client import ServerEndpoint
from megarl.sync.adapters import AdapterSender
from megarl.sync.broadcast import BroadcastSender
from megarl.sync.device_segment import DeviceSegment
from megarl.sync.disk import DiskSender
from megarl.sync.memory import DeviceMemory, Memory, NodeMemory, Pieces
from megarl.sync.outgoing import PlannedPieces, trainer_of
from megarl.sync.peer_memory import PeerMemory
from megarl.sync.plan import Receiver, SyncPlan, broadcast_bytes, plan_sync
from megarl.sync.planned import Planned
from megarl.sync.ring import bucket_limit
from megarl.sync.segments import Segment
from megarl.sync.sending import Sending
from megarl.sync.session import SyncReport
from megarl.sync.shared_memory import SharedMemorySender


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
    """The `Transport` over torch.distributed: who holds a part of the model sends it.

    planned: what is gathered on whom, and where.
    """

    def __init__(self, sender: BroadcastSender, bucket_bytes: int, planned: Planned) -> None:
        self.sender = sender
        self._bucket_bytes, self._planned = bucket_bytes, planned

    def send(
        self, weights: Weights, version: int, servers: Sequence[ServerEndpoint], *, flush_cache: bool = True
    ) -> SyncReport | None:
        """As the interface says."""
        helped = self.sender.backend_for(servers) == "nccl"
        bucket_bytes = broadcast_bytes(self._bucket_bytes, helped=helped)
        with weights.gatherer() as gatherer, self._planned.peers:
            outgoing, _ = self._planned.outgoing(gatherer, "broadcast", bucket_bytes, helped=helped)
            return self.sender.send(outgoing, version, servers, flush_cache=flush_cache)

    def leave(self, servers: Sequence[ServerEndpoint], deadline_s: float) -> dict[str, str]:
        """As the interface says."""
        self.close()
        return self.sender.leave(servers, deadline_s)

    def close(self) -> None:
        """Leave the group with the servers, and give the memory back."""
        self.sender.close()
        self._planned.peers.close()


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

    receivers: the servers, each with the ranks beside it. nodes: of every rank. is_kept: the memory, from sync to sync.
    """

    def __init__(
        self,
        sender: SharedMemorySender,
        rank: int,
        bucket_bytes: int,
        nodes: tuple[int, ...],
        receivers: tuple[Receiver, ...],
        *,
        is_kept: bool,
    ) -> None:
        self.sender: SharedMemorySender = sender
        self._is_kept = is_kept
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
            try:
                return self.sender.send(pieces, version, servers, flush_cache=flush_cache)
            finally:
                if not self._is_kept:
                    self.sender.close()


class Disk(_LeavesNothing):
    """The `Transport` over a folder that ranks and servers see: who holds a part of the model writes it.

    planned: what is gathered on whom, and where.
    """

    def __init__(self, sender: DiskSender, bucket_bytes: int, planned: Planned) -> None:
        self.sender: DiskSender = sender
        self._bucket_bytes, self._planned = bucket_bytes, planned

    def send(
        self, weights: Weights, version: int, servers: Sequence[ServerEndpoint], *, flush_cache: bool = True
    ) -> SyncReport | None:
        """As the interface says; no server takes part."""
        with weights.gatherer() as gatherer, self._planned.peers:
            outgoing, plan = self._planned.outgoing(gatherer, "disk", self._bucket_bytes, helped=False)
            return self.sender.write(outgoing, [plan.file(bucket) for bucket in plan.buckets], version)

    def close(self) -> None:
        """Forget what was written last, and give the memory back."""
        super().close()
        self._planned.peers.close()


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
    registry = sending.registries[rank]
    make = partial(_device_memory, platform=platform, registry=registry)
    planned = Planned(sending.nodes, rank, _peer_memory(rank, platform, make, control), quantized=sending.quantized)
    if sending.transport == "broadcast":
        sender = BroadcastSender(
            rank=rank,
            host=host,
            device=platform.device,
            backend="gloo" if sending.through_host else platform.backend,
            timeout_s=sending.timeout_s,
            control=control,
        )
        return Broadcast(sender, sending.bucket_bytes, planned)
    if sending.transport == "disk":
        assert sending.versions is not None, sending
        store, whole_bytes = sending.versions.store, sending.versions.whole_bytes
        deltas = not sending.versions.in_place
        writer = DiskSender(rank=rank, store=store, whole_bytes=whole_bytes, deltas=deltas, control=control)
        return Disk(writer, sending.bucket_bytes, planned)
    memory: Memory = NodeMemory(
        rank=rank, writers=sending.writers, registry=registry, device=platform.device, control=control
    )
    if sending.beside:
        hosts = {receiver.name: receiver.ranks for receiver in sending.beside}
        memory = DeviceMemory(rank=rank, hosts=hosts, make=make, control=control)
    shared = SharedMemorySender(
        rank=rank,
        memory=memory,
        bucket_bytes=sending.bucket_bytes,
        timeout_s=sending.timeout_s,
        device=platform.device,
        control=control,
    )
    if sending.beside:
        is_kept = not platform.has_device_memory  # a device's is for training meanwhile
        return SharedDevices(shared, rank, sending.bucket_bytes, sending.nodes, sending.beside, is_kept=is_kept)
    return SharedMemory(shared, sending.bucket_bytes)


def _peer_memory(
    rank: int, platform: Platform, make: Callable[[int], DeviceSegment | Segment], control: dist.ProcessGroup | None
) -> PeerMemory:
    open_ = partial(DeviceSegment.open, device=platform.device) if platform.has_device_memory else Segment.open
    # A device's memory is for training meanwhile.
    return PeerMemory(rank=rank, make=make, open_=open_, control=control, is_kept=not platform.has_device_memory)


def _device_memory(num_bytes: int, platform: Platform, registry: Path) -> DeviceSegment | Segment:
    """Memory of this rank's device; the node's, where processes stand for devices."""
    if platform.has_device_memory:
        return DeviceSegment(num_bytes, platform.device)
    return Segment.make(num_bytes, registry)
