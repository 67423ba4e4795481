"""What a pool knows of each of its servers, and how often they may die. Not for doing anything about it (servers.py).

starting -> ready -> current -> serving -> suspect -> gone -> starting
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from megarl.cluster.waits import Worker
from megarl.core.errors import GivenUpError
from megarl.serving.client import ServerEndpoint

WINDOW_S = 3600.0  # in which deaths are counted against rollout.max_restarts


class State(Enum):
    """Of one server. Only one that serves gets requests, and none serves whose weights were not verified."""

    STARTING = "its processes were told to start"
    READY = "it answers, with the weights that its files have"
    CURRENT = "the last sync's weights have arrived"
    SERVING = "they were verified, and the router knows it"
    SUSPECT = "it ended, failed or stands still, and what is left of it is being ended"
    GONE = "nothing of it is left"


ALIVE = frozenset({State.READY, State.CURRENT, State.SERVING})


@dataclass(frozen=True)
class Server:
    """A server that is up. others: beside its parts on other nodes, which answer nobody."""

    worker: Worker
    others: tuple[Worker, ...]
    endpoint: ServerEndpoint
    pid: int  # of the SGLang process itself; 0 where nobody here knows it

    def __str__(self) -> str:
        pid = f", pid {self.pid}" if self.pid else ""
        return f"{self.endpoint.name} ({self.endpoint.url}{pid})"


@dataclass
class Member:
    """One place of the pool. parts: beside each part of its server. server: while it is up. left: when it last was lost.

    kind: what its server calls itself, before its number.
    """

    index: int
    parts: tuple[Worker, ...]
    kind: str = "sglang server"
    state: State = State.STARTING
    server: Server | None = None
    left: float | None = None
    for_good: bool = False  # it does not come back

    @property
    def name(self) -> str:
        """As its server calls itself."""
        return f"{self.kind} {self.index}"


@dataclass
class Restarts:
    """How often servers, router and collectors died, and whether they may be started once more.

    most: starts within WINDOW_S, over all of them; 0: nothing is started again. total: starts so far.
    """

    most: int
    clock: Callable[[], float] = time.monotonic
    total: int = 0
    deaths: Counter[str] = field(default_factory=Counter)
    _times: list[float] = field(default_factory=list)

    def count(self, name: str, reason: str) -> bool:
        """Count a death; whether to start it again. Raises GivenUpError where there were too many."""
        self.deaths[name] += 1
        if not self.most:
            return False
        now = self.clock()
        self._times = [each for each in self._times if now - each < WINDOW_S]
        if len(self._times) >= self.most:
            often = ", ".join(f"{who} {count}" for who, count in self.deaths.most_common())
            raise GivenUpError(
                f"{name} died, and rollout.max_restarts allows {self.most} within {WINDOW_S / 60:g} minutes. "
                f"Deaths so far: {often}. {reason}"
            )
        self._times.append(now)
        self.total += 1
        return True
