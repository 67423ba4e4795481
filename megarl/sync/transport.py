"""How weights travel to the servers: the one interface of all transports, and which of them a run takes.

broadcast works between any two nodes. shared_memory needs the model's first copy and all servers on one node, and is faster
there: ranks write side by side, and no byte goes through a socket.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch.distributed as dist

from megarl.core.errors import UserError
from megarl.serving.client import ServerEndpoint
from megarl.sync.broadcast import BroadcastSender, Bucket
from megarl.sync.group import BackendName
from megarl.sync.segments import NUM_SEGMENTS
from megarl.sync.session import SyncReport
from megarl.sync.shared_memory import Pieces, SharedMemorySender

TransportName = Literal["broadcast", "shared_memory"]

MIB = 2**20
# Large enough that a bucket's calls cost little beside its bytes, small enough that the first and the last, which nothing
# overlaps, are a small part of a sync.
SHARED_BUCKET_BYTES = 64 * MIB


class Weights(Protocol):
    """What a transport may ask a rank for. Every rank is asked the same."""

    def buckets(self, bucket_bytes: int) -> Iterator[Bucket]:
        """Whole tensors on rank 0, gathered from all ranks."""
        ...

    def pieces(self, bucket_bytes: int) -> AbstractContextManager[Pieces]:
        """What this rank writes into memory that it shares."""
        ...


class Transport(Protocol):
    """The sending end on one rank. Every rank makes one, and makes the same calls."""

    def send(
        self, weights: Weights, version: int, servers: Sequence[ServerEndpoint], *, flush_cache: bool = True
    ) -> SyncReport | None:
        """Send all weights to all servers and give them the version; the report is rank 0's, None elsewhere.

        flush_cache: servers forget what they computed with the old weights; False for those that hold requests in place.
        A server's failure is no exception: the report names it, and the others have the weights.
        """
        ...

    def leave(self, servers: Sequence[ServerEndpoint], deadline_s: float) -> dict[str, str]:
        """Close, and have servers that go on without this run give up what they hold of it; who did not, and why. On rank 0."""
        ...

    def close(self) -> None:
        """Give back what is kept from sync to sync."""
        ...


@dataclass(frozen=True)
class Broadcast:
    """The `Transport` that gathers on rank 0 and sends over torch.distributed."""

    sender: BroadcastSender
    bucket_bytes: int

    def send(
        self, weights: Weights, version: int, servers: Sequence[ServerEndpoint], *, flush_cache: bool = True
    ) -> SyncReport | None:
        """As the interface says."""
        return self.sender.send(lambda: weights.buckets(self.bucket_bytes), version, servers, flush_cache=flush_cache)

    def leave(self, servers: Sequence[ServerEndpoint], deadline_s: float) -> dict[str, str]:
        """As the interface says."""
        return self.sender.leave(servers, deadline_s)

    def close(self) -> None:
        """Leave the group with the servers."""
        self.sender.close()


@dataclass(frozen=True)
class SharedMemory:
    """The `Transport` over memory that ranks and servers share."""

    sender: SharedMemorySender
    bucket_bytes: int

    def send(
        self, weights: Weights, version: int, servers: Sequence[ServerEndpoint], *, flush_cache: bool = True
    ) -> SyncReport | None:
        """As the interface says."""
        with weights.pieces(min(self.bucket_bytes, SHARED_BUCKET_BYTES)) as pieces:
            return self.sender.send(pieces, version, servers, flush_cache=flush_cache)

    def leave(self, servers: Sequence[ServerEndpoint], deadline_s: float) -> dict[str, str]:
        """Servers hold nothing of the memory once they have loaded from it."""
        self.close()
        return {}

    def close(self) -> None:
        """Give the memory back."""
        self.sender.close()


@dataclass(frozen=True)
class Sending:
    """What the ranks are told of how to send. writers: the ranks that hold the model's first copy.

    registry: of the shared memory that is removed with the run, on the writers' node. bucket_bytes: most that is sent at once,
    but for a tensor that is larger. timeout_s: of one attempt.
    """

    transport: TransportName
    writers: tuple[int, ...]
    registry: Path
    bucket_bytes: int
    timeout_s: float


def make_transport(
    sending: Sending,
    *,
    rank: int,
    host: str,
    device: str,
    backend: BackendName,
    control: dist.ProcessGroup | None,
) -> Transport:
    """The sending end of one rank; the rest as `BroadcastSender` takes it."""
    if sending.transport == "broadcast":
        sender = BroadcastSender(
            rank=rank, host=host, device=device, backend=backend, timeout_s=sending.timeout_s, control=control
        )
        return Broadcast(sender, sending.bucket_bytes)
    shared = SharedMemorySender(
        rank=rank, writers=sending.writers, registry=sending.registry, timeout_s=sending.timeout_s, control=control
    )
    return SharedMemory(shared, sending.bucket_bytes)


@dataclass(frozen=True)
class Where:
    """What decides on a transport. writers, servers: the nodes of the ranks that hold the first copy, and of the servers.

    takes_memory: whether servers there load from the host's memory as fast as from any other. external: somebody else started
    the servers. needed_bytes: shared memory that is needed; free_bytes: what the node has, None where it cannot be seen from
    here.
    """

    writers: Collection[str]
    servers: Collection[str]
    takes_memory: bool
    needed_bytes: int
    free_bytes: int | None
    external: bool = False


def choose(wanted: Literal["auto", "broadcast", "shared_memory"], where: Where) -> tuple[TransportName, str]:
    """A transport, and why it is this one. Raises UserError where the one that is wanted cannot work."""
    if wanted == "broadcast":
        return "broadcast", "sync.transport asks for it"
    against = _against_shared_memory(where)
    if not against:
        auto = f"the model's first copy and all servers are on {next(iter(where.writers))}"
        return "shared_memory", auto if wanted == "auto" else "sync.transport asks for it"
    if wanted == "auto":
        return "broadcast", against
    raise UserError(
        f"sync.transport is shared_memory, but {against}. Set sync.transport to auto or broadcast, which works everywhere."
    )


def _against_shared_memory(where: Where) -> str:
    """Why shared memory is not to be taken; nothing where it is."""
    if where.external:
        return "the servers of rollout.servers.urls are not this run's own, and may be on any machine"
    if not where.takes_memory:
        return "devices here have memory of their own, which shared memory of the host does not reach directly"
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


def shared_bytes(largest_tensor: int, bucket_bytes: int) -> int:
    """Shared memory that a sync takes. largest_tensor: bytes of the model's largest, which is sent whole."""
    return NUM_SEGMENTS * max(largest_tensor, min(bucket_bytes, SHARED_BUCKET_BYTES))
