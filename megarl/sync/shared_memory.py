"""Sends the trainer's weights to servers on the trainer's own node: ranks write them into memory that servers load from.

There are two buckets. Every rank that holds a part of the model's first copy writes its own rows into one, while the
servers load the other: nothing is gathered, and nothing goes through a socket but names. All ranks of all servers read the
same memory. A server that answers with an error, dies, or is late is named and left out. The rest go on where they are: unlike
in a broadcast no server waits for another's part, so nothing is sent twice. Whether the servers then hold the right
weights is for verify.py to say.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.core.errors import MegarlError, SyncError
from megarl.models.hf_pieces import Entry, size_of
from megarl.serving.client import ServerClient, ServerEndpoint
from megarl.sync.segments import NUM_SEGMENTS, Handle, Segment
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
    left,
)

STOP = -1


class Pieces(Protocol):
    """What is sent: buckets that every rank knows, and that each rank fills where it holds something."""

    @property
    def buckets(self) -> Sequence[Sequence[Entry]]:
        """What lies where in each bucket."""
        ...

    def write(self, number: int, flat: Tensor) -> None:
        """Write this rank's rows of a bucket into its memory."""
        ...


class SharedMemorySender:
    """The sending end. Every rank of the trainer makes one and calls `send`; rank 0 leads.

    writers: the ranks that hold the model's first copy; all are on the servers' node. registry: file with the names of shared
    memory that is removed when the run ends. control: the trainer ranks' own process group, which tells them which bucket is
    next and rank 0 that it is whole; None where there is one rank. timeout_s: longest sync. join_s: how long a server may take
    for one bucket, beside what its bytes take.
    """

    def __init__(
        self,
        *,
        rank: int,
        writers: Collection[int],
        registry: Path,
        timeout_s: float,
        control: dist.ProcessGroup | None = None,
        join_s: float = JOIN_S,
    ) -> None:
        assert 0 in writers, writers
        self._rank = rank
        self._writes = rank in writers
        self._registry = registry
        self._timeout_s = timeout_s
        self._control = control
        self._join_s = join_s
        self._segments: tuple[Segment, ...] = ()
        self._size = 0

    def send(
        self, pieces: Pieces, version: int, servers: Sequence[ServerEndpoint], *, flush_cache: bool = True
    ) -> SyncReport | None:
        """Send all buckets to all servers and give them the version; None on every rank but 0.

        flush_cache: servers forget what they computed with the old weights. False for servers that hold requests in place:
        flushing would end them (`ServerClient.pause`).

        A server's failure is no exception: the report names it. Where no server is left, `ok` is empty.
        Raises SyncError where the memory is not to be had, and what a rank raises that cannot write.
        """
        self._take_segments(max(map(size_of, pieces.buckets)))
        if self._rank == 0:
            return asyncio.run(self._lead(pieces, version, servers, flush_cache))
        while (number := self._word(STOP)) != STOP:
            self._fill(pieces, number)
        return None

    def close(self) -> None:
        """Let go of the memory; rank 0, which made it, removes it."""
        for segment in self._segments:
            segment.close()
        self._segments, self._size = (), 0

    async def _lead(
        self, pieces: Pieces, version: int, servers: Sequence[ServerEndpoint], flush_cache: bool
    ) -> SyncReport:
        began, watch = time.monotonic(), Stopwatch()
        end = began + self._timeout_s
        tps = {server.name: server.tp for server in servers}
        async with connected(servers) as clients:
            failures = await everyone(clients, lambda client: client.begin_weight_update(left(end)))
            watch.lap("begin")
            loads: dict[str, asyncio.Task[None]] = {}
            num_bytes = 0
            try:
                for number, bucket in enumerate(pieces.buckets):
                    if len(failures) == len(clients):
                        break
                    await asyncio.to_thread(self._fill_next, pieces, number)
                    watch.lap("write")
                    failures |= await _settled(loads)
                    watch.lap("load")
                    num_bytes += sum(entry.nbytes for entry in bucket)
                    limit_s = bucket_limit_s(size_of(bucket), end, self._join_s)
                    loads = self._start_loads(number, bucket, _without(clients, failures), tps, limit_s, flush_cache)
                failures |= await _settled(loads)
                watch.lap("load")
            finally:
                for load in loads.values():
                    load.cancel()
            self._word(STOP)
            failures |= await everyone(_without(clients, failures), lambda client: commit(client, version, end))
            watch.lap("commit")
        ok = tuple(server.name for server in servers if server.name not in failures)
        failed = {name: str(error) for name, error in failures.items()}
        return SyncReport(version, ok, failed, num_bytes, time.monotonic() - began, 1, watch.seconds)

    def _start_loads(
        self,
        number: int,
        bucket: Sequence[Entry],
        clients: Clients,
        tps: dict[str, int],
        limit_s: float,
        flush_cache: bool,
    ) -> dict[str, asyncio.Task[None]]:
        segment = self._segments[number % NUM_SEGMENTS]

        async def load(client: ServerClient, tp: int) -> None:
            payload = segment.payload(bucket, num_readers=tp)
            await client.update_from_tensors([payload] * tp, limit_s, flush_cache=flush_cache)

        return {name: asyncio.create_task(load(client, tps[name])) for name, client in clients.items()}

    def _fill_next(self, pieces: Pieces, number: int) -> None:
        self._word(number)
        self._fill(pieces, number)

    def _fill(self, pieces: Pieces, number: int) -> None:
        """Write what this rank holds; returns, on every rank, once all have written. Raises where one of them could not."""
        trouble: Exception | None = None
        if self._writes:
            try:
                pieces.write(number, self._segments[number % NUM_SEGMENTS].flat)
            except Exception as error:  # raised below: the others wait for this rank's word first
                trouble = error
        if self._control is not None:
            failed = torch.tensor([int(trouble is not None)])
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._control)
            if trouble is None and failed.item():
                raise SyncError("Another rank could not write its part of the weights; its own error says why.")
        if trouble is not None:
            raise trouble

    def _word(self, number: int) -> int:
        """Rank 0's word which bucket is next, on every rank; what the others pass is not heard."""
        if self._control is None:
            return number
        word = torch.tensor([number])
        dist.broadcast(word, src=0, group=self._control)
        return int(word.item())

    def _take_segments(self, num_bytes: int) -> None:
        """Have memory for two buckets of this size. It is kept: taking it costs as much as writing into it."""
        if self._size >= num_bytes:
            return
        self.close()
        handles: list[Any] = [None] * NUM_SEGMENTS
        try:
            if self._rank == 0:
                self._segments = tuple(Segment.make(num_bytes, self._registry) for _ in handles)
                handles = [segment.handle for segment in self._segments]
        finally:
            if self._control is not None:
                dist.broadcast_object_list(handles, src=0, group=self._control)
        if self._rank != 0:
            given = [_given(handle) for handle in handles]
            self._segments = tuple(map(Segment.open, given)) if self._writes else ()
        self._size = num_bytes


def _given(handle: Handle | None) -> Handle:
    if handle is None:
        raise SyncError("Rank 0 could not take the shared memory of the weight sync; its own error says why.")
    return handle


def _without(clients: Clients, failures: Failures) -> Clients:
    return {name: client for name, client in clients.items() if name not in failures}


async def _settled(loads: dict[str, asyncio.Task[None]]) -> Failures:
    """Wait for all loads, each of which has a deadline of its own; whose failed. Raises what is no server's failure."""
    results = await asyncio.gather(*loads.values(), return_exceptions=True)
    failures: Failures = {}
    for name, result in zip(loads, results, strict=True):
        if isinstance(result, MegarlError):
            failures[name] = result
        elif result is not None:
            raise result
    return failures
