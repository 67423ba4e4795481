"""Sends the trainer's weights to the servers over torch.distributed: one rank broadcasts, every server receives.

The sending rank joins a process group with all servers and broadcasts flattened buckets, while it tells each server
over HTTP what comes. A server that answers with an error, dies, or is late is named and left out; the group is made
anew without it, and the whole sync repeated for the rest. Whether the servers then hold the right weights is for
verify.py to say.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.core.errors import DeadlineError, MegarlError, SyncError
from megarl.serving.client import ServerClient, ServerEndpoint, ServerError
from megarl.sync.group import BackendName, MeetingPlace, SendGroup, Slot, connect, flatten, slots
from megarl.sync.session import (
    JOIN_S,
    Clients,
    Failures,
    Stopwatch,
    SyncReport,
    bucket_limit_s,
    commit,
    connected,
    everyone,
    failures_of,
    left,
)

Bucket = list[tuple[str, Tensor]]  # HF names and full tensors
Buckets = Callable[[], Iterator[Bucket]]  # called once an attempt: each gathers anew

GRACE_S = 10.0  # how long servers may take to notice that an attempt was given up
ARRIVAL_POLL_S = 0.005


class BroadcastSender:
    """The sending end. Every rank of the trainer makes one and calls `send`: gathering is collective, rank 0 sends.

    host: this node's address, as the servers reach it. backend: for servers on devices of their own; NCCL refuses two
    processes on one device, so that gloo serves those that share the ranks'. control: the trainer ranks' own process
    group, over which rank 0 tells the others whether to gather once more; None where there is one rank. timeout_s: longest
    single attempt. join_s: how long a broadcast waits for its members; gloo cannot be told to give up earlier.
    """

    def __init__(
        self,
        *,
        rank: int,
        host: str,
        device: str,
        backend: BackendName,
        timeout_s: float,
        control: dist.ProcessGroup | None = None,
        grace_s: float = GRACE_S,
        join_s: float = JOIN_S,
    ) -> None:
        self._rank = rank
        self._host = host
        self._device = torch.device(device)
        self._backend: BackendName = backend
        self._timeout_s = timeout_s
        self._control = control
        self._grace_s = grace_s
        self._join_s = join_s
        self._group: SendGroup | None = None
        # Servers refuse a group whose name they have seen: a later sender's must differ from this one's.
        self._name = uuid.uuid4().hex[:12]
        self._groups_made = 0
        self._flush_cache = True
        self._watch = Stopwatch()

    def send(
        self, buckets: Buckets, version: int, servers: Sequence[ServerEndpoint], *, flush_cache: bool = True
    ) -> SyncReport | None:
        """Send all buckets to all servers and give them the version; None on every rank but 0.

        flush_cache: servers forget what they computed with the old weights. False for servers that hold requests in place:
        flushing would end them (`ServerClient.pause`).

        A server's failure is no exception: the report names it. Where no server is left, `ok` is empty.
        Raises SyncError when the sending itself fails.
        """
        if self._rank == 0:
            self._flush_cache = flush_cache
            return asyncio.run(self._lead(buckets, version, servers))
        while self._gather_again(False):
            for _ in buckets():
                continue
        return None

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def leave(self, servers: Sequence[ServerEndpoint], deadline_s: float) -> dict[str, str]:
        """Leave the group, and have these servers give up whatever they hold of this sender; who did not, and why.

        For servers that go on without this process. Rank 0's alone to do.
        """
        self.close()
        return asyncio.run(self._end_groups(servers, deadline_s))

    async def _end_groups(self, servers: Sequence[ServerEndpoint], deadline_s: float) -> dict[str, str]:
        """Also those that a server was in before it went and came back."""

        async def end(client: ServerClient) -> None:
            for number in range(self._groups_made, 0, -1):
                try:
                    await client.destroy_group(self._group_name(number), deadline_s)
                except ServerError as error:
                    if "does not exist" not in str(error):
                        raise

        async with connected(servers) as clients:
            failures = await everyone(clients, end)
        return {name: str(error) for name, error in failures.items()}

    def _group_name(self, number: int) -> str:
        return f"megarl-{self._name}-{number}"

    def _gather_again(self, again: bool) -> bool:
        """Rank 0's word, on every rank; what the others pass is not heard."""
        if self._control is None:
            return again
        word = torch.tensor([int(again)], device=self._device)
        dist.broadcast(word, src=0, group=self._control)
        return bool(word.item())

    async def _lead(self, buckets: Buckets, version: int, servers: Sequence[ServerEndpoint]) -> SyncReport:
        began = time.monotonic()
        failed: dict[str, str] = {}
        num_bytes = attempts = 0
        async with connected(servers) as clients:
            remaining = list(servers)
            try:
                while remaining:
                    attempts += 1
                    end = time.monotonic() + self._timeout_s
                    here = {server.name: clients[server.name] for server in remaining}
                    self._watch = Stopwatch()
                    failures, num_bytes, again = await self._attempt(buckets, version, remaining, here, end)
                    failed |= {name: str(error) for name, error in failures.items()}
                    remaining = [server for server in remaining if server.name not in failures]
                    if not again:
                        break
            finally:
                self._gather_again(False)
        ok = tuple(server.name for server in remaining)
        return SyncReport(version, ok, failed, num_bytes, time.monotonic() - began, attempts, self._watch.seconds)

    async def _attempt(
        self, buckets: Buckets, version: int, servers: list[ServerEndpoint], clients: Clients, end: float
    ) -> tuple[Failures, int, bool]:
        """Who failed, bytes sent, and whether the rest need another attempt."""
        failures = await self._join(servers, clients, end)
        if not failures:
            failures = await everyone(clients, lambda client: client.begin_weight_update(left(end)))
        if failures:
            return await self._give_up(clients, failures), 0, True
        assert self._group is not None
        self._gather_again(True)
        self._watch.lap("begin")
        failures, num_bytes = await self._stream(buckets, clients, end)
        if failures:
            return await self._give_up(clients, failures), num_bytes, True
        # From here on a server that fails takes nothing from the others.
        failures = await everyone(clients, lambda client: commit(client, version, end))
        self._watch.lap("commit")
        return failures, num_bytes, False

    async def _join(self, servers: list[ServerEndpoint], clients: Clients, end: float) -> Failures:
        """Be in a group with exactly these servers."""
        if self._group is not None and self._group.servers == tuple(servers):
            return {}
        if self._group is not None:
            old = self._group.name
            self.close()
            await everyone(clients, lambda client: client.destroy_group(old, left(end)))
        self._groups_made += 1
        name = self._group_name(self._groups_made)
        backend: BackendName = "gloo" if any(server.shares_devices for server in servers) else self._backend
        places, world_size = slots(servers)
        place = MeetingPlace(self._host, world_size, left(end))
        calls = {
            slot.server.name: asyncio.create_task(
                clients[slot.server.name].init_group(
                    host=place.host,
                    port=place.port,
                    rank_offset=slot.rank_offset,
                    world_size=world_size,
                    group=name,
                    backend=backend,
                    # Longer than giving up takes, so that who answers it can be told from who does not.
                    deadline_s=left(end) + 3 * self._grace_s,
                )
            )
            for slot in places
        }
        reason = None
        try:
            # NCCL's members do not wait for each other until the first broadcast: their calls just return.
            while not (come := place.arrived() >= world_size - 1 or _all_well(calls)):
                if time.monotonic() > end or failures_of(calls):
                    break
                await asyncio.sleep(ARRIVAL_POLL_S)
            if come:
                self._group = await asyncio.to_thread(connect, name, servers, place, backend)
        except RuntimeError as error:
            reason = f"the group could not be made: {error}"
        first = failures_of(calls)
        if self._group is None:
            reason = reason or "not every server came to join the group"
            await self._await_stragglers(place, places, calls)
            place.close()
        return await self._settle(calls, first, reason)

    async def _await_stragglers(
        self, place: MeetingPlace, places: list[Slot], calls: dict[str, asyncio.Task[None]]
    ) -> None:
        """Wait, after giving up, until every server that has not answered is at the meeting place.

        Closing it turns away whoever is there; a server that comes later would look for it for half an hour.
        """
        end = time.monotonic() + self._grace_s
        while time.monotonic() < end:
            coming = sum(slot.server.tp for slot in places if not calls[slot.server.name].done())
            if place.arrived() >= coming:
                return
            await asyncio.sleep(ARRIVAL_POLL_S)

    async def _stream(self, buckets: Buckets, clients: Clients, end: float) -> tuple[Failures, int]:
        """Send every bucket; after a failure the rest are still gathered, because the other ranks gather them too."""
        assert self._group is not None
        failures: Failures = {}
        num_bytes = 0
        for bucket in buckets():
            self._watch.lap("gather")
            if not failures:
                failures = await self._send_bucket(bucket, clients, self._group, end)
                self._watch.lap("send and load")
                num_bytes += sum(tensor.nbytes for _, tensor in bucket)
        return failures, num_bytes

    async def _send_bucket(self, bucket: Bucket, clients: Clients, group: SendGroup, end: float) -> Failures:
        names = [name for name, _ in bucket]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket]
        shapes = [list(tensor.shape) for _, tensor in bucket]
        calls = {
            name: asyncio.create_task(
                client.update_from_distributed(
                    names, dtypes, shapes, group.name, left(end) + self._grace_s, flush_cache=self._flush_cache
                )
            )
            for name, client in clients.items()
        }
        flat = flatten(bucket, self._device)
        limit_s = bucket_limit_s(flat.nbytes, end, self._join_s)
        sending = asyncio.create_task(group.broadcast(flat, limit_s))
        everything: set[asyncio.Task[None]] = {sending, *calls.values()}
        await asyncio.wait(everything, timeout=left(end), return_when=asyncio.FIRST_EXCEPTION)
        if all(task.done() and task.exception() is None for task in everything):
            return {}
        first = failures_of(calls)
        group.abort()
        (outcome,) = await asyncio.gather(sending, return_exceptions=True)
        # Leaving frees the servers that still wait in the broadcast: they answer with an error, and so say that they
        # live.
        self.close()
        return await self._settle(calls, first, None if outcome is None else str(outcome))

    async def _settle(self, calls: dict[str, asyncio.Task[None]], first: Failures, reason: str | None) -> Failures:
        """Wait for what is left of the calls and say who is to blame for what went wrong; nobody where all went well.

        Servers that cannot be reached or stay silent are; else those that answered with an error of their own accord.
        The errors of all others are these servers' passed on, so they get another attempt. first: who had failed when
        the attempt was given up. reason: what went wrong on this side.
        """
        await asyncio.wait(calls.values(), timeout=self._grace_s if reason is not None or first else None)
        answered: Failures = {}
        silent: Failures = {}
        for name, call in calls.items():
            if not call.done():
                call.cancel()
                silent[name] = DeadlineError(f"{name} did not answer within {self._grace_s:g} s of a sync given up")
            elif isinstance(error := call.exception(), ServerError):
                answered[name] = error
            elif isinstance(error, MegarlError):
                silent[name] = error
            elif error is not None:
                raise error
        if reason is not None and not silent and not answered:
            raise SyncError(f"The weight sync failed on the trainer's side, every server is well: {reason}")
        return silent or {name: error for name, error in answered.items() if name in first} or answered

    async def _give_up(self, clients: Clients, failures: Failures) -> Failures:
        """Bring the servers that did not fail back to where an attempt starts; those that cannot, fail too."""
        self.close()
        others = {name: client for name, client in clients.items() if name not in failures}
        return failures | await everyone(others, lambda client: client.close_weight_update(self._grace_s))


def _all_well(calls: dict[str, asyncio.Task[None]]) -> bool:
    return all(call.done() for call in calls.values()) and not failures_of(calls)
