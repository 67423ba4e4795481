"""Collectors that die, are frozen, or die while they start: another one in their place, as often as the recipe allows."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from megarl.cluster import collector_pool
from megarl.cluster.collector_pool import CollectorPool
from megarl.cluster.collector_vigil import Silent, until_silent
from megarl.cluster.healing import Restarts
from megarl.cluster.process import LOOPBACK, ProcessFacts, ProcessSpec
from megarl.cluster.waits import Worker
from megarl.core.errors import GivenUpError, WorkerDiedError
from megarl.recipe.run import Deadlines
from megarl.serving import vigil
from tests.support.fake_pool import FakeActor, FakeRef, FakeWaiter

SOON = Deadlines(start_s=0.5, answer_s=0.5)


class Stage:
    """Two collectors, of which any may die."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, most: int = 8) -> None:
        self.killed: list[Any] = []
        monkeypatch.setattr(collector_pool.ray, "kill", self.killed.append)
        self.tmp_path = tmp_path
        self.coordinator = FakeActor("coordinator")
        self.waiter = FakeWaiter()
        self.signals: list[tuple[str, int, int]] = []
        self.waiter.notices = {}  # type: ignore[attr-defined]
        self.waiter.nodes = SimpleNamespace(signal=lambda *to: self.signals.append(to))  # type: ignore[attr-defined]
        self.restarts = Restarts(most)
        self.pool = CollectorPool(
            self.worker("coordinator", self.coordinator),
            [self.start(0), self.start(1)],
            self.restarts,
            self.waiter,  # type: ignore[arg-type]
            self.start,
        )

    def worker(self, name: str, actor: FakeActor) -> Worker:
        return Worker(actor, ProcessSpec(name, self.tmp_path), ProcessFacts(5, "h"))

    def start(self, owner: int) -> Worker:
        return self.worker(f"collector {owner}", FakeActor(f"collector {owner}"))

    def die(self, owner: int) -> None:
        """Its process ends, and its watch tells."""
        actor = self.pool.workers[owner].handle
        [ref] = [ref for ref in self.waiter.watches if ref.actor is actor]
        self.waiter.watches.pop(ref)("killed")

    def end(self, method: str, results: list[Any], failure: str = "") -> None:
        """The last call of this method that is followed ends."""
        ref: FakeRef = [ref for ref in self.waiter.followed if ref.method == method][-1]
        self.waiter.followed.pop(ref)[1](results, failure)


def failing(why: str) -> Callable[[], str]:
    """Fails once, then answers."""
    left = [WorkerDiedError(why)]

    def ask() -> str:
        if left:
            raise left.pop()
        return "answered"

    return ask


def test_one_that_dies_is_replaced_and_what_met_its_death_is_worth_asking_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    stage = Stage(monkeypatch, tmp_path)
    old, other = stage.pool.workers
    stage.die(0)
    new = stage.pool.workers[0]
    assert new is not old and stage.pool.workers[1] is other and stage.killed == [old.handle]
    # The coordinator knows of the death before it hears of the successor.
    told = [name for name, _ in stage.coordinator.told if name in ("died", "replace")]
    assert told == ["died", "replace"] and stage.coordinator.calls("died") == [(0,)]
    assert stage.pool.asked(failing("collector 0 died")) == "answered"
    with pytest.raises(WorkerDiedError, match="rank 1"):  # no collector died since
        stage.pool.asked(failing("rank 1 died"))
    stage.waiter.idle.append(lambda: stage.die(1))
    assert stage.pool.asked(failing("collector 1 died")) == "answered", "its watch tells a moment later"


def test_one_that_dies_while_it_starts_is_a_death_like_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    stage = Stage(monkeypatch, tmp_path, most=2)
    stage.die(0)
    first = stage.pool.workers[0]
    stage.end("replace", [], "its supervisor ended: ActorDiedError")
    assert stage.pool.workers[0] is not first and stage.restarts.total == 2
    with pytest.raises(GivenUpError, match=r"collector 0 died, and rollout\.max_restarts allows 2") as caught:
        stage.die(0)
    assert not stage.pool._replaced(caught.value), "whoever asked must not ask again"


def test_a_frozen_one_is_ended_by_a_signal_on_its_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    stage = Stage(monkeypatch, tmp_path)
    stage.end("vigil", [Silent(ProcessFacts(77, "h", "10.0.0.2"), "It stood still.")])
    assert stage.signals == [("10.0.0.2", 77, signal.SIGKILL)]
    assert not stage.killed and stage.restarts.total == 0, "its end is watched, and counted once"


class Collector:
    """What the vigil asks: a handle whose `facts` a test answers."""

    def __init__(self, answer: Callable[[], Awaitable[ProcessFacts]]) -> None:
        self.facts = SimpleNamespace(remote=answer)


def test_a_stopped_process_is_found_although_nobody_asks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vigil, "FROZEN_S", 0.2)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:

        async def answer() -> ProcessFacts:
            return ProcessFacts(process.pid, "h", LOOPBACK)

        async def go() -> Silent:
            handle = Collector(answer)
            watching = asyncio.create_task(until_silent(handle, Deadlines(), LOOPBACK, look_s=0.05))
            await asyncio.sleep(0.5)
            assert not watching.done()
            os.kill(process.pid, signal.SIGSTOP)
            return await asyncio.wait_for(watching, 10)

        try:
            silent = asyncio.run(go())
        finally:
            process.kill()
    assert silent.facts is not None and silent.facts.pid == process.pid
    assert "stood still" in silent.why


def test_silence_is_found_on_another_node_and_at_the_start_and_death_is_not() -> None:
    answers = 0

    async def once() -> ProcessFacts:
        nonlocal answers
        answers += 1
        if answers > 1:
            await asyncio.Event().wait()
        return ProcessFacts(1, "far", "10.0.0.9")

    async def never() -> ProcessFacts:
        await asyncio.Event().wait()
        raise AssertionError

    async def dies() -> ProcessFacts:
        raise RayActorError()

    async def go(answer: Callable[[], Awaitable[ProcessFacts]], within_s: float = 10.0) -> Silent:
        return await asyncio.wait_for(until_silent(Collector(answer), SOON, LOOPBACK, look_s=0.05), within_s)

    silent = asyncio.run(go(once))
    assert silent.facts is not None and "gave no answer for" in silent.why
    silent = asyncio.run(go(never))
    assert silent.facts is None and silent.why == "It did not start within 0.5 s."
    with pytest.raises(TimeoutError):
        asyncio.run(go(dies, 0.5))
