"""How many requests a collector has at the servers, and in which order they begin."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Gate:
    """At most `most` requests at once, those of the earliest step first, of these the longest expected; none while it is closed.

    The step comes first because others wait for its last request: one that a weight sync cut off must not queue behind the
    groups of the step after.

    servers: that these requests share; where fewer run than there are servers, the rest are idle. clock: seconds that only go up.
    """

    def __init__(self, most: int, servers: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._servers, self._clock = most, servers, clock
        self._open = True
        self._running = 0
        self._order = itertools.count()
        self._queue: list[tuple[int, float, int, asyncio.Future[None]]] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._busy_s = 0.0
        self._since = clock()

    @property
    def closed(self) -> bool:
        """Whether no request begins."""
        return not self._open

    @property
    def running(self) -> int:
        """Requests at the servers."""
        return self._running

    @property
    def queued(self) -> int:
        """Requests that wait for their turn."""
        return len(self._queue)

    def busy_s(self) -> float:
        """Seconds of work so far, as a mean over the servers."""
        self._count(0)
        return self._busy_s

    @asynccontextmanager
    async def request(self, step: int = 0, expected_tokens: float = 0.0) -> AsyncIterator[None]:
        """A request's time at the servers: begins when it is its turn. step: that waits for it."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (step, -expected_tokens, next(self._order), turn)
        heapq.heappush(self._queue, entry)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if entry in self._queue:
                self._queue.remove(entry)
                heapq.heapify(self._queue)
            elif turn.done() and not turn.cancelled():
                self._leave()
            raise
        try:
            yield
        finally:
            self._leave()

    def close(self) -> None:
        """No further request begins; those that run go on."""
        self._open = False

    def open(self) -> None:
        """Requests begin again."""
        self._open = True
        self._admit()

    async def idle(self) -> None:
        """Returns once no request runs."""
        await self._idle.wait()

    def _admit(self) -> None:
        while self._open and self._queue and self._running < self._most:
            *_, turn = heapq.heappop(self._queue)
            if turn.cancelled():
                continue
            self._count(1)
            turn.set_result(None)

    def _leave(self) -> None:
        self._count(-1)
        self._admit()

    def _count(self, change: int) -> None:
        now = self._clock()
        self._busy_s += (now - self._since) * min(1.0, self._running / self._servers)
        self._since = now
        self._running += change
        if self._running:
            self._idle.clear()
        else:
            self._idle.set()
