"""The process group of a weight sync, seen from the trainer: rank 0 sends, every rank of every server receives.

SGLang makes its side with torch.distributed's own helpers; this side speaks to the same backend directly, because those
helpers neither accept a group beside the trainer's own one nor let go of it when a server never comes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, BackendConfig

from megarl.core.errors import DeadlineError
from megarl.serving.client import ServerEndpoint

BackendName = Literal["gloo", "nccl"]

CONNECT_S = 30.0  # longest wait for connections once every server has come to the meeting place
POLL_S = 0.002


@dataclass(frozen=True)
class Slot:
    """A server's place in the group: ranks [rank_offset, rank_offset + tp)."""

    server: ServerEndpoint
    rank_offset: int


def slots(servers: Sequence[ServerEndpoint]) -> tuple[list[Slot], int]:
    """Ranks for every server, after the sender's rank 0; and the size of the group."""
    taken, result = 1, []
    for server in servers:
        result.append(Slot(server, taken))
        taken += server.tp
    return result, taken


class MeetingPlace:
    """The store that the members of a group find each other through, on a free port of one address.

    As long as only it holds the store, closing it turns away whoever waits for members that will not come.
    """

    def __init__(self, host: str, world_size: int, timeout_s: float) -> None:
        listener = socket.create_server((host, 0))
        self.host, self.port = host, int(listener.getsockname()[1])
        self.store: TCPStore | None = TCPStore(
            host,
            self.port,
            world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def arrived(self) -> int:
        """How many ranks wait for the others, before the sender connects: gloo's ranks each leave an address here."""
        return 0 if self.store is None else len(self.store.list_keys())

    def close(self) -> None:
        """Close the store."""
        self.store = None


class SendGroup:
    """A joined group."""

    def __init__(self, name: str, servers: Sequence[ServerEndpoint], backend: Any, place: MeetingPlace) -> None:
        self.name = name
        self.servers = tuple(servers)
        self._backend = backend
        self._place = place

    async def broadcast(self, tensor: Tensor, timeout_s: float) -> None:
        """Send a tensor to every member; returns when it is on its way to all. Raises DeadlineError, RuntimeError."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=timeout_s)
        work = self._backend.broadcast([tensor], options)
        try:
            # Gloo keeps the time itself, and frees its members when it is over; NCCL leaves that to us.
            async with asyncio.timeout(timeout_s + POLL_S * 100):
                while not work.is_completed():
                    await asyncio.sleep(POLL_S)
        except TimeoutError as late:
            raise DeadlineError(f"a broadcast of {tensor.nbytes:,} bytes took over {timeout_s:g} s") from late
        work.wait()

    def abort(self) -> None:
        """End what is under way; with gloo, which cannot, it ends when its time is over."""
        self._backend.abort()

    def close(self) -> None:
        """Leave: members that wait for the sender get an error. No broadcast may be under way."""
        self._backend = None
        self._place.close()


def connect(name: str, servers: Sequence[ServerEndpoint], place: MeetingPlace, backend: BackendName) -> SendGroup:
    """Connect to members that have all arrived; blocks. Raises RuntimeError where a connection cannot be made."""
    _, world_size = slots(servers)
    device = next(iter(BackendConfig(Backend(backend)).get_device_backend_map()))
    assert place.store is not None
    # The names that SGLang's own init_custom_process_group and torch's _new_process_group_helper put in front of keys.
    store = PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, place.store)))
    if backend == "gloo":
        made: Any = dist.ProcessGroupGloo(store, 0, world_size, timedelta(seconds=CONNECT_S))
    else:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=CONNECT_S)
        made = dist.ProcessGroupNCCL(store, 0, world_size, options)
    return SendGroup(name, servers, made, place)


def flatten(bucket: Sequence[tuple[str, Tensor]], device: torch.device) -> Tensor:
    """SGLang's flattened_bucket: the bytes of all tensors end to end. [bytes] uint8."""
    return torch.cat([tensor.detach().to(device).flatten().view(torch.uint8) for _, tensor in bucket])
