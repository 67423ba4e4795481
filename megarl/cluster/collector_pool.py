"""The collectors' processes as the driver knows them: one that dies or stands still is started again in its place.

Nothing here runs by itself: it goes on while the driver waits for something (waits.py). What was lost with one is made anew
by the coordinator's word.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import ray

from megarl.cluster.collector_vigil import Silent
from megarl.cluster.healing import Restarts
from megarl.cluster.services import RayDiedError
from megarl.cluster.waits import WATCH_WAIT_S, Call, Waiter, Worker
from megarl.core.errors import DeadlineError, GivenUpError, WorkerDiedError
from megarl.core.log import get_logger

T = TypeVar("T")

log = get_logger(__name__)


@dataclass
class CollectorPool:
    """The collectors by their numbers, and what brings one back. start: starts one anew, by its number."""

    coordinator: Worker
    workers: list[Worker]
    restarts: Restarts
    waiter: Waiter
    start: Callable[[int], Worker]
    _deaths: int = 0
    _told: int = 0  # deaths that `_replaced` has told of

    def __post_init__(self) -> None:
        for owner in range(len(self.workers)):
            self._watch(owner)

    def asked(self, ask: Callable[[], T]) -> T:
        """What `ask` gives: asked again where a collector died of which it needs something, and is replaced."""
        while True:
            try:
                return ask()
            except WorkerDiedError as error:
                if not self._replaced(error):
                    raise

    def _replaced(self, error: WorkerDiedError) -> bool:
        """Whether this came of the death of a collector that is replaced, so that it is worth asking again."""
        if isinstance(error, (GivenUpError, RayDiedError)):
            return False
        if self._deaths == self._told:
            # Whoever called it has seen its end; whoever watches it may see it a moment later.
            with contextlib.suppress(DeadlineError):
                self.waiter.until(lambda: self._deaths > self._told, "The end of a collector", WATCH_WAIT_S)
        before, self._told = self._told, self._deaths
        return self._deaths > before

    def _watch(self, owner: int) -> None:
        worker = self.workers[owner]
        self.waiter.deaths.watch(worker.facts)
        self.waiter.watches[worker.handle.watch.remote()] = partial(self._died, owner, worker)
        vigil = Call(self.coordinator, self.coordinator.handle.vigil.remote(worker.handle))
        self.waiter.follow([vigil], partial(self._stands_still, owner, worker))
        self._listen(owner)

    def _died(self, owner: int, worker: Worker, how: str) -> None:
        """Another one starts in its place, and the coordinator is told once it has."""
        if self.workers[owner] is not worker:
            return
        how = self.waiter.deaths.how(worker.facts, how)
        if not self.restarts.count(worker.name, how):
            raise GivenUpError(f"{worker.name} died, and rollout.max_restarts is 0. {how}")
        log.warning("%s died, and is started again: its unfinished samples are made anew. %s", worker.name, how)
        self._deaths += 1
        ray.kill(worker.handle)  # one that only could not be reached has nothing to say any more
        new = self.workers[owner] = self.start(owner)
        # Before anything else is asked: no step may count on what has died.
        self.coordinator.handle.died.remote(owner)
        self._watch(owner)
        told = self.coordinator.handle.replace.remote(owner, new.handle, new.handle.start.remote())
        self.waiter.follow([Call(self.coordinator, told)], partial(self._joined, owner, new, time.monotonic()))

    def _joined(self, owner: int, worker: Worker, began: float, results: list[Any], failure: str) -> None:
        if failure:
            self._died(owner, worker, f"It did not start: {failure}")
        elif self.workers[owner] is worker:
            log.warning("%s is back after %.0f s", worker.name, time.monotonic() - began)

    def _stands_still(self, owner: int, worker: Worker, results: list[Silent], failure: str) -> None:
        """One that does not go on is ended, and its end is watched. A failure is the coordinator's, which is watched too."""
        if failure or self.workers[owner] is not worker:
            return
        silent = results[0]
        log.warning("%s is ended: %s", worker.name, silent.why)
        if silent.facts is None:
            self._died(owner, worker, silent.why)
        else:
            # Ray asks a process to end, and one that is frozen does not hear it.
            self.waiter.nodes.signal(silent.facts.address, silent.facts.pid, signal.SIGKILL)

    def _listen(self, owner: int) -> None:
        """Show what a collector has to tell, also while it is waited for."""

        def told(line: str) -> None:
            log.warning("%s", line)
            self._listen(owner)

        self.waiter.notices[self.workers[owner].handle.notice.remote()] = told
