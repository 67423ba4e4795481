"""Sends the trainer's weights to servers on the trainer's own node: ranks write them into memory that servers load from.

Buckets take turns in one piece of memory. Every rank that holds a part of the model's first copy writes its own rows into one,
while the servers load those before it: nothing is gathered, and nothing goes through a socket but names. All ranks of all
servers read the same memory. A server that answers with an error, dies, or is late is named and left out. The rest go on where
they are: unlike in a broadcast no server waits for another's part, so nothing is sent twice. Whether the servers then hold the
right weights is for verify.py to say.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from megarl.core.errors import MegarlError
from megarl.models.hf_pieces import Entry, size_of
from megarl.serving.client import ServerEndpoint
from megarl.sync.memory import Memory, Pieces
from megarl.sync.ring import Turn, ring_bytes, turns
from megarl.sync.session import (
    GRACE_S,
    JOIN_S,
    Clients,
    Failures,
    Stopwatch,
    SyncReport,
    begin,
    bucket_limit_s,
    commit,
    connected,
    everyone,
    failures_of,
    meet,
    ranks_failed,
)

STOP = -1
LAST = 2**62


class SharedMemorySender:
    """The sending end. Every rank of the trainer makes one and calls `send`; rank 0 leads.

    memory: that buckets take turns in. bucket_bytes: two such buckets are taken of it. control: the trainer ranks' own process
    group, which tells them which bucket is next; None where there is one rank. device: of this rank, whose tensors the group
    takes. timeout_s: longest sync. join_s: how long a server may take for one bucket, beside what its bytes take.
    """

    def __init__(
        self,
        *,
        rank: int,
        memory: Memory,
        bucket_bytes: int,
        timeout_s: float,
        device: str,
        control: dist.ProcessGroup | None = None,
        join_s: float = JOIN_S,
    ) -> None:
        self._rank, self._device = rank, device
        self._memory = memory
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._control = control
        self._join_s = join_s
        self._turns: list[Turn] = []

    def send(
        self, pieces: Pieces, version: int, servers: Sequence[ServerEndpoint], *, flush_cache: bool = True
    ) -> SyncReport | None:
        """Send all buckets to all servers and give them the version; None on every rank but 0.

        flush_cache: servers forget what they computed with the old weights. False for servers that hold requests in place:
        flushing would end them (`ServerClient.pause`).

        A server's failure is no exception: the report names it. Where no server is left, `ok` is empty.
        Raises SyncError where the memory is not to be had or ranks take longer than the sync may, and what a rank raises
        that cannot write.
        """
        self._take_memory([size_of(bucket) for bucket in pieces.buckets])
        if self._rank == 0:
            return asyncio.run(self._lead(pieces, version, servers, flush_cache))
        while (word := self._word(STOP, servers))[0] != STOP:
            self._fill(pieces, *word)
        return None

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()

    async def _lead(
        self, pieces: Pieces, version: int, servers: Sequence[ServerEndpoint], flush_cache: bool
    ) -> SyncReport:
        began, watch = time.monotonic(), Stopwatch()
        end = began + self._timeout_s
        async with connected(servers) as clients:
            failures = await everyone(clients, lambda client: begin(client, end))
            watch.lap("begin")
            loads = Loads()
            num_bytes = 0
            try:
                for number, bucket in enumerate(pieces.buckets):
                    failures |= await self._read(number, loads, _without(clients, failures), end)
                    watch.lap("load")
                    if len(failures) == len(clients):
                        break
                    await asyncio.to_thread(self._fill_next, pieces, number, servers, _without(clients, failures))
                    watch.lap("write")
                    if time.monotonic() > end:
                        self._word(STOP, servers)  # every rank has written, and waits for the next word
                        raise ranks_failed(
                            f"the ranks had not written bucket {number} within {self._timeout_s:g} s (deadlines.sync_s)."
                        )
                    num_bytes += sum(entry.nbytes for entry in bucket)
                    # Those before it are still being loaded.
                    limit_s = bucket_limit_s(self._memory.size, end, self._join_s)
                    failures |= loads.failures()
                    calls = self._start_loads(number, bucket, _without(clients, failures), limit_s, flush_cache)
                    loads.add(number, calls)
                failures |= await loads.settled()
                watch.lap("load")
            except BaseException:
                await loads.cancelled()
                await everyone(clients, lambda client: client.close_weight_update(GRACE_S))
                raise
            self._word(STOP, servers)
            failures |= await everyone(_without(clients, failures), lambda client: commit(client, version, end))
            watch.lap("commit")
        ok = tuple(server.name for server in servers if server.name not in failures)
        failed = {name: str(error) for name, error in failures.items()}
        return SyncReport(version, ok, failed, num_bytes, time.monotonic() - began, 1, watch.seconds)

    async def _read(self, number: int, loads: Loads, clients: Clients, end: float) -> Failures:
        """Wait until nobody reads any more where a bucket is to be written. Who failed.

        Ranks of a server let go of a bucket before they begin with what comes next, and wait for each other in that (SGLang
        0.5.21, managers/scheduler_components/weight_updater.py): where its answer comes early, the next one says that all have.
        """
        after = self._turns[number].after
        early = {name: client for name, client in clients.items() if name in self._memory.answered_early}
        if after is None or not early:
            return await loads.settled(after)
        found = await loads.settled(min(after + 1, number - 1))
        if after == number - 1:  # nothing was sent behind it
            found |= await everyone(_without(early, found), lambda client: meet(client, end))
        return found

    def _start_loads(
        self,
        number: int,
        bucket: Sequence[Entry],
        clients: Clients,
        limit_s: float,
        flush_cache: bool,
    ) -> dict[str, asyncio.Task[None]]:
        start = self._turns[number].start
        # Now: once the next bucket is filled it is too late.
        payloads = {name: self._memory.payloads(client.endpoint, bucket, start) for name, client in clients.items()}
        return {
            name: asyncio.create_task(client.update_from_tensors(payloads[name], limit_s, flush_cache=flush_cache))
            for name, client in clients.items()
        }

    def _fill_next(
        self, pieces: Pieces, number: int, servers: Sequence[ServerEndpoint], readers: Collection[str]
    ) -> None:
        self._fill(pieces, *self._word(number, servers, readers))

    def _fill(self, pieces: Pieces, number: int, readers: Collection[str]) -> None:
        self._memory.fill(pieces, number, self._turns[number].start, readers)

    def _word(
        self, number: int, servers: Sequence[ServerEndpoint], readers: Collection[str] = ()
    ) -> tuple[int, Collection[str]]:
        """Rank 0's word which bucket is next, and which of the servers read it, on every rank; the others' is not heard."""
        if self._control is None:
            return number, readers
        word = torch.tensor([number, *(server.name in readers for server in servers)], device=self._device)
        dist.broadcast(word, src=0, group=self._control)
        number, *reads = map(int, word.tolist())
        return number, [server.name for server, read in zip(servers, reads, strict=True) if read]

    def _take_memory(self, sizes: Sequence[int]) -> None:
        """Have memory for these buckets to take turns in. It is kept: taking it costs as much as writing into it."""
        num_bytes = ring_bytes(max(sizes), self._bucket_bytes)
        if self._memory.size < num_bytes:
            self._memory.take(num_bytes)
        self._turns = turns(sizes, self._memory.size)


def _without(clients: Clients, failures: Failures) -> Clients:
    return {name: client for name, client in clients.items() if name not in failures}


class Loads:
    """What servers are asked to load and have not yet: of each bucket, a call for each server."""

    def __init__(self) -> None:
        self._calls: dict[int, dict[str, asyncio.Task[None]]] = {}

    def add(self, number: int, calls: dict[str, asyncio.Task[None]]) -> None:
        """They have begun."""
        self._calls[number] = calls

    def failures(self) -> Failures:
        """Who has failed so far, and was not told of."""
        return {name: error for calls in self._calls.values() for name, error in failures_of(calls).items()}

    async def settled(self, until: int | None = LAST) -> Failures:
        """Wait for all buckets up to this one; None is for none. Who failed. Raises what is no server's failure.

        Each call has a deadline of its own.
        """
        found: Failures = {}
        for number in [each for each in self._calls if until is not None and each <= until]:
            calls = self._calls.pop(number)
            results = await asyncio.gather(*calls.values(), return_exceptions=True)
            for name, result in zip(calls, results, strict=True):
                if isinstance(result, MegarlError):
                    found.setdefault(name, result)
                elif result is not None:
                    raise result
        return found

    async def cancelled(self) -> None:
        """Give up all of them."""
        calls = [call for calls in self._calls.values() for call in calls.values()]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
