"""The process groups of a weight sync, seen from the trainer: one rank sends, every rank of every server receives.

SGLang makes its side with torch.distributed's own helpers; this side speaks to the same backend directly, because those
helpers neither accept a group beside the trainer's own one nor let go of it when a server never comes.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, BackendConfig

from megarl.core.errors import DeadlineError
from megarl.serving.client import ServerEndpoint

BackendName = Literal["gloo", "nccl"]
Address = tuple[str, int]

CONNECT_S = 30.0  # longest wait for connections once every server has come to the meeting place
POLL_S = 0.001
# Rank 0's words to the other members of a group, and the sender's to rank 0, in the group's own store.
COME, GIVE_UP, BEGUN = WORDS = "megarl/come", "megarl/give_up", "megarl/begun"


@dataclass(frozen=True)
class Slot:
    """A server's place in the group: ranks [rank_offset, rank_offset + tp)."""

    server: ServerEndpoint
    rank_offset: int


def slots(servers: Sequence[ServerEndpoint], num_members: int = 1) -> tuple[list[Slot], int]:
    """Ranks for every server, after those of the trainer; and the size of the group."""
    taken, result = num_members, []
    for server in servers:
        result.append(Slot(server, taken))
        taken += server.tp
    return result, taken


class MeetingPlace:
    """The store that the members of a group find each other through, on a free port of one address.

    As long as only the trainer's ranks hold it, closing it turns away whoever waits for members that will not come.
    """

    def __init__(self, store: TCPStore, address: Address) -> None:
        self.store: TCPStore | None = store
        self.address = address

    @classmethod
    def make(cls, host: str, timeout_s: float) -> MeetingPlace:
        """A new one, on this rank."""
        listener = socket.create_server((host, 0))
        port = int(listener.getsockname()[1])
        store = TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return cls(store, (host, port))

    @classmethod
    def find(cls, address: Address, timeout_s: float) -> MeetingPlace:
        """Another rank's. Raises RuntimeError (torch's DistError) where it is not there any more."""
        return cls(TCPStore(*address, timeout=timedelta(seconds=timeout_s), wait_for_workers=False), address)

    def arrived(self) -> int:
        """How many ranks wait for the others, before the sender connects: gloo's ranks each leave an address here."""
        return 0 if self.store is None else sum(not key.endswith(WORDS) for key in self.store.list_keys())

    def all_come(self) -> None:
        """Tell the members that every server has come."""
        if self.store is not None:
            self.store.set(COME, "")

    def give_up(self, coming: int) -> None:
        """Tell the members to give up, once as many ranks have come as are on their way."""
        if self.store is not None:
            self.store.set(GIVE_UP, str(coming))

    def is_come(self) -> bool:
        """Whether `all_come` was said."""
        return self.store is not None and self.store.check([COME])

    def is_given_up(self) -> bool:
        """Whether `give_up` was said."""
        return self.store is None or self.store.check([GIVE_UP])

    def coming(self) -> int:
        """What `give_up` was said with."""
        return 0 if self.store is None else int(self.store.get(GIVE_UP))

    def begin(self, number: int) -> None:
        """Tell rank 0 that the sender has put a bucket together, and begins to send it."""
        if self.store is not None:
            self.store.set(BEGUN, str(number))

    def has_begun(self, number: int) -> bool:
        """Whether `begin` was said of a bucket. Raises RuntimeError (torch's DistError) where nobody is there to ask."""
        return self.store is not None and self.store.check([BEGUN]) and int(self.store.get(BEGUN)) >= number

    def close(self) -> None:
        """Close the store."""
        self.store = None


class Sent:
    """Broadcasts that are under way; it keeps their tensors alive."""

    def __init__(self, works: Sequence[Any], tensors: Sequence[Tensor], timeout_s: float) -> None:
        self._works, self._tensors = works, tensors
        self._timeout_s, self._end = timeout_s, time.monotonic() + timeout_s

    def wait(self, is_given_up: Callable[[], bool], abort: Callable[[], None]) -> None:
        """Until all are on their way to every member. Raises DeadlineError, RuntimeError.

        is_given_up: asked meanwhile; then they are aborted, and waited for all the same: the memory is theirs until they end.
        """
        # Gloo keeps the time itself, and frees its members when it is over; NCCL leaves that to us.
        polls, aborted = 0, False
        while not all(work.is_completed() for work in self._works):
            if time.monotonic() > self._end + POLL_S * 200:
                nbytes = sum(tensor.nbytes for tensor in self._tensors)
                raise DeadlineError(f"a broadcast of {nbytes:,} bytes took over {self._timeout_s:g} s")
            polls += 1
            if polls % 50 == 0 and not aborted and is_given_up():
                abort()
                aborted = True
            time.sleep(POLL_S)
        for work in self._works:
            work.wait()


class SendGroup:
    """A joined group, on one of its trainer's ranks."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def start(self, tensors: Sequence[Tensor], timeout_s: float) -> Sent:
        """Begin to send tensors, contiguous ones, to every member; on other members than the sender, to receive them."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=timeout_s)
        return Sent([self._backend.broadcast([tensor], options) for tensor in tensors], tensors, timeout_s)

    def abort(self) -> None:
        """End what is under way; with gloo, which cannot, it ends when its time is over."""
        self._backend.abort()

    def close(self) -> None:
        """Leave: members that wait for the sender get an error. No broadcast may be under way."""
        self._backend = None


def connect(
    name: str, rank: int, world_size: int, place: MeetingPlace, backend: BackendName, limit_s: float
) -> SendGroup:
    """Connect to members that have all arrived; blocks. Raises RuntimeError where a connection cannot be made.

    limit_s: longer than anybody waits for a broadcast. NCCL takes no limit of a single one, and its watchdog ends the process
    of whoever waits longer: it is the last to notice.
    """
    device = next(iter(BackendConfig(Backend(backend)).get_device_backend_map()))
    assert place.store is not None
    # The names that SGLang's own init_custom_process_group and torch's _new_process_group_helper put in front of keys.
    store = PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, place.store)))
    if backend == "gloo":
        return SendGroup(dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=CONNECT_S)))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=limit_s)
    return SendGroup(dist.ProcessGroupNCCL(store, rank, world_size, options))


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """SGLang's flattened_bucket: the bytes of all tensors end to end, [bytes] uint8. A view, where they lie so already."""
    parts = [tensor.detach().flatten().view(torch.uint8) for tensor in tensors]
    first, sizes = parts[0], [part.numel() for part in parts]
    ends = accumulate(sizes, initial=first.data_ptr())
    one_memory = len({part.untyped_storage().data_ptr() for part in parts}) == 1
    if one_memory and all(part.data_ptr() == end for part, end in zip(parts, ends, strict=False)):
        return first.as_strided((sum(sizes),), (1,))
    return torch.cat(parts)
