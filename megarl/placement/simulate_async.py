"""Plays an asynchronous rollout: servers answer samples of several steps at once, as far ahead as staleness allows.

Groups are admitted and taken as megarl.rollout.producer has it: a step takes what finished first, and waits for groups that no
later step may train on.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megarl.placement.lengths import Floats


@dataclass(frozen=True)
class Flow:
    """What is played.

    tokens: [groups, samples of one] of responses for each step, which are asked for one step after another. train_s: [steps]
    seconds of the ranks. sync_s: of a weight sync, in which servers wait. staleness: versions that samples may be behind.
    servers: how many. start_s: for which a sample that begins keeps its server from the others. decode_s: [1 + running] of a
    server's step, by sequences in it; as many as this has run at most.
    """

    tokens: Iterable[Floats]
    train_s: Floats
    sync_s: float
    staleness: int
    servers: int
    start_s: float
    decode_s: Floats


@dataclass(frozen=True)
class Flowed:
    """[steps]. end_s: when each step ended. busy_s: seconds that servers worked until then, as a mean over them; tail_s: of
    these, while fewer than a quarter of the sequences that a server holds ran."""

    end_s: Floats
    busy_s: Floats
    tail_s: Floats


class _Server:
    """Its sequences gain a token with each of its steps, which take the longer the more they are."""

    def __init__(self, decode_s: list[float]) -> None:
        self._decode_s = decode_s
        self._at_s, self._tokens = 0.0, 0.0
        self.ends: list[tuple[float, int]] = []  # by tokens of the server, and group
        self.busy_s = self.tail_s = 0.0
        self.changes = 0

    def advance(self, now_s: float) -> None:
        """Decode until now; a server that reads a prompt or waits for weights may be ahead of now."""
        if now_s > self._at_s:
            if self.ends:
                spent = now_s - self._at_s
                self._tokens += spent / self._decode_s[len(self.ends)]
                self.busy_s += spent
                self.tail_s += spent * (len(self.ends) < max((len(self._decode_s) - 1) / 4, 1))
            self._at_s = now_s

    def start(self, now_s: float, tokens: float, group: int, start_s: float) -> None:
        self.advance(now_s)
        heapq.heappush(self.ends, (self._tokens + tokens, group))
        self._at_s += start_s
        self.busy_s += start_s

    def wait(self, now_s: float, seconds: float) -> None:
        self.advance(now_s)
        self._at_s += seconds

    def next_end_s(self) -> float:
        return self._at_s + max(self.ends[0][0] - self._tokens, 0.0) * self._decode_s[len(self.ends)]

    def finish(self, now_s: float) -> int:
        """The group whose sample ends now."""
        self.advance(now_s)
        return heapq.heappop(self.ends)[1]


class _Play:
    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.coming = iter(flow.tokens)
        first = next(self.coming)
        self.steps, self.size, self.samples = len(flow.train_s), *first.shape
        # Lengths of groups that are not admitted yet: no more are drawn than that.
        self.tokens = deque(first)
        decode_s = flow.decode_s.tolist()
        self.servers = [_Server(decode_s) for _ in range(flow.servers)]
        self.running = np.zeros(flow.servers, np.int64)
        self.most = len(decode_s) - 1
        # (seconds, server or -1 for the ranks, its count of changes when this was known)
        self.events: list[tuple[float, int, int]] = []
        self.queue: deque[tuple[int, float]] = deque()
        self.admitted = self.taken = self.version = 0
        self.collecting = True
        self.version_of: dict[int, int] = {}
        self.left: dict[int, int] = {}
        self.ages: Counter[int] = Counter()  # groups that run, by version
        self.finished: list[int] = []

    def admit(self, now_s: float) -> None:
        """Ask for as many groups as may wait, and let samples begin while a server has room."""
        ahead = (self.flow.staleness + self.collecting) * self.size
        while self.admitted < self.steps * self.size and self.admitted - self.taken < ahead:
            group, self.admitted = self.admitted, self.admitted + 1
            if not self.tokens:
                self.tokens.extend(next(self.coming))
            self.version_of[group], self.left[group] = self.version, self.samples
            self.ages[self.version] += 1
            self.queue.extend((group, float(tokens)) for tokens in self.tokens.popleft())
        while self.queue:
            index = int(np.argmin(self.running))
            if self.running[index] >= self.most:
                break
            group, tokens = self.queue.popleft()
            self.servers[index].start(now_s, tokens, group, self.flow.start_s)
            self.running[index] += 1
            self.expect(index)

    def expect(self, index: int) -> None:
        """A server's next end is another than it was."""
        server = self.servers[index]
        server.changes += 1
        if server.ends:
            heapq.heappush(self.events, (server.next_end_s(), index, server.changes))

    def finish(self, index: int, now_s: float) -> None:
        group = self.servers[index].finish(now_s)
        self.running[index] -= 1
        self.expect(index)
        self.left[group] -= 1
        if not self.left[group]:
            del self.left[group]
            version = self.version_of[group]
            self.ages[version] -= 1
            if not self.ages[version]:
                del self.ages[version]  # of a long run there are many
            self.finished.append(group)

    def take(self, now_s: float) -> None:
        """The ranks begin a step, where they wait for one and what it takes is there."""
        last = self.version - self.flow.staleness
        due = any(version <= last for version in self.ages)
        if not self.collecting or len(self.finished) < self.size or due:
            return
        # Stable: of others, those that finished first.
        chosen = sorted(self.finished, key=lambda group: self.version_of[group] > last)[: self.size]
        gone = set(chosen)
        self.finished = [group for group in self.finished if group not in gone]
        for group in chosen:
            del self.version_of[group]
        self.taken += self.size
        self.collecting = False
        heapq.heappush(self.events, (now_s + self.flow.train_s[self.version], -1, 0))

    def sync(self, now_s: float) -> float:
        """Weights go to the servers; when they are there."""
        for index, server in enumerate(self.servers):
            server.wait(now_s, self.flow.sync_s)
            self.expect(index)
        self.version += 1
        self.collecting = True
        return now_s + self.flow.sync_s


def play(flow: Flow) -> Flowed:
    """Play all steps."""
    state, now_s = _Play(flow), 0.0
    ends: list[tuple[float, float, float]] = []
    while True:
        state.take(now_s)
        state.admit(now_s)
        now_s, index, changes = heapq.heappop(state.events)
        if index < 0:
            now_s = state.sync(now_s)
            busy, tail = (sum(getattr(each, name) for each in state.servers) for name in ("busy_s", "tail_s"))
            ends.append((now_s, busy / flow.servers, tail / flow.servers))
            if len(ends) == state.steps:
                return Flowed(*np.array(ends).T)
        elif changes == state.servers[index].changes:
            state.finish(index, now_s)
