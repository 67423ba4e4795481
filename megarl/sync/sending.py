"""How weights are sent: what ranks are told of it, and which transport a run takes. Without torch: the driver decides.

broadcast works between any two nodes. shared_memory needs, on CPUs, the model's first copy and all servers on one node; on
devices with memory of their own, a rank that holds weights on every device of a server. It is faster there: ranks write side by
side, and no byte goes through a socket. disk needs nothing but a folder that ranks and servers see:
ranks write a version, and each server's own process beside it fetches that. The transports themselves: transport.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megarl.core.errors import UserError
from megarl.sync.plan import Receiver
from megarl.sync.store import Store

TransportName = Literal["broadcast", "shared_memory", "disk", "adapters"]

MIB = 2**20


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

    registries: of the shared memory that is removed with the run, on each rank's node. bucket_bytes: most that is sent at once,
    but for a tensor that is larger. timeout_s: of one attempt. versions: where they go over the disk. quantized: linears of
    layers in FP8. adapters: the folder of LoRA adapters that are sent alone. beside: the servers, each with the ranks on its
    devices, where they share the devices' memory. through_host: broadcasts go by gloo, whatever the ranks' own backend is.
    """

    transport: TransportName
    writers: tuple[int, ...]
    nodes: tuple[int, ...]
    registries: tuple[Path, ...]
    bucket_bytes: int
    timeout_s: float
    versions: Versions | None = None
    quantized: bool = False
    adapters: Path | None = None
    beside: tuple[Receiver, ...] = ()
    through_host: bool = False

    @property
    def fetched(self) -> Versions | None:
        """Where servers are to fetch what the ranks wrote; None where the ranks send it to them."""
        return self.versions if self.transport == "disk" else None


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
