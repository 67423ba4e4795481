"""What every transport of a weight sync shares: the calls to all servers, who failed them, and the report.

How the weights themselves travel is the transports' own: broadcast.py, shared_memory.py.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from megarl.core.errors import MegarlError, SyncError
from megarl.serving.client import OF_MODEL, ServerClient, ServerEndpoint
from megarl.serving.external import check_run

Clients = dict[str, ServerClient]
Failures = dict[str, MegarlError]  # by the server's name

GRACE_S = 10.0  # how long servers may take to notice that a sync was given up
# How long one bucket may take: a server that just answered needs moments to begin, and every way carries more than this.
JOIN_S = 30.0
# So many times GRACE_S is for servers to answer an attempt that was given up, and to be brought back to where one starts.
BLAME = 4
# A sync that servers fail one after another takes no longer than so many attempts that last to their end.
ATTEMPTS = 3
SLOWEST_BYTES_PER_S = 50e6
NO_TENSORS = base64.b64encode(pickle.dumps([])).decode()  # as SGLang reads a list of tensors


@dataclass(frozen=True)
class SyncReport:
    """What a sync did. ok: names of servers that hold the version. failed: name -> reason. num_bytes: counted once.

    pieces: seconds of the parts of the work, by name, in the last attempt.
    """

    version: int
    ok: tuple[str, ...]
    failed: dict[str, str]
    num_bytes: int
    seconds: float
    attempts: int
    pieces: dict[str, float] = field(default_factory=dict)


class Stopwatch:
    """Seconds by what they were spent on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.monotonic()

    def lap(self, piece: str) -> None:
        """What was done since the last lap was this."""
        now = time.monotonic()
        self.seconds[piece] = self.seconds.get(piece, 0.0) + now - self._since
        self._since = now


@asynccontextmanager
async def connected(servers: Sequence[ServerEndpoint]) -> AsyncIterator[Clients]:
    """A client for each server, by its name."""
    async with AsyncExitStack() as stack:
        yield {server.name: await stack.enter_async_context(ServerClient(server)) for server in servers}


async def begin(client: ServerClient, end: float) -> None:
    """Open a server's update, and have it call what it has of its own for that."""
    await client.begin_weight_update(left(end))
    if client.endpoint.loader:
        body = {"serialized_named_tensors": [NO_TENSORS] * client.endpoint.tp, "load_format": client.endpoint.loader}
        # The buckets that follow forget cached prefixes, where these may be forgotten.
        await client.ask("/update_weights_from_tensor", body | OF_MODEL | {"flush_cache": False}, left(end))


async def commit(client: ServerClient, version: int, end: float) -> None:
    """Make a server serve what it received."""
    await client.end_weight_update(left(end))
    await check_run(client, left(end))
    await client.set_weight_version(version, left(end))


async def meet(client: ServerClient, end: float) -> None:
    """Return once every rank of a server has done what it was asked before, on its device as well."""
    # Each gives the first its hashes; here of no tensor, since the name of every one holds the empty one.
    await client.ask("/weights_checker", OF_MODEL | {"action": "checksum", "skip_tensor_list": [""]}, left(end))


async def everyone(clients: Clients, call: Callable[[ServerClient], Awaitable[None]]) -> Failures:
    """Call all servers side by side; who failed."""

    async def one(client: ServerClient) -> MegarlError | None:
        try:
            await call(client)
        except MegarlError as error:
            return error
        return None

    results = await asyncio.gather(*(one(client) for client in clients.values()))
    return {name: error for name, error in zip(clients, results, strict=True) if error is not None}


def failures_of(calls: dict[str, asyncio.Task[None]]) -> Failures:
    """Who has failed so far."""
    done = {name: call.exception() for name, call in calls.items() if call.done() and not call.cancelled()}
    return {name: error for name, error in done.items() if isinstance(error, MegarlError)}


def ranks_failed(reason: str) -> SyncError:
    """What to raise where no server is to blame."""
    return SyncError(f"The weight sync failed on the trainer's side, every server is well: {reason}")


def bucket_limit_s(num_bytes: int, end: float, join_s: float = JOIN_S) -> float:
    """Longest time that a bucket may take on its way, in seconds; end: of the attempt, in monotonic time."""
    return min(left(end), join_s + num_bytes / SLOWEST_BYTES_PER_S)


def left(end: float) -> float:
    """Seconds until `end`, in monotonic time; a moment where it is over."""
    return max(0.01, end - time.monotonic())
