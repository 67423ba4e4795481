"""The coordinator's side of collectors that die: nothing is begun twice, and what waits for one goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from megarl.rollout.links import LinkLostError, Links
from megarl.rollout.tasks import EvalFacts, GroupTask, News
from megarl.serving.client import ServerEndpoint

T = TypeVar("T")


def eval_facts(rows: Sequence[int]) -> EvalFacts:
    zeros, no = np.zeros(len(rows), np.float32), np.zeros(len(rows), np.bool_)
    return EvalFacts(np.array(rows, np.int64), zeros, zeros, np.ones(len(rows), np.int64), no, no, no, None)


@dataclass(eq=False)
class FakeLink:
    """A collector that lives until it is told to die: then every call fails, those that wait too."""

    told: list[str] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    dies_at: str = ""
    dead: asyncio.Event = field(default_factory=asyncio.Event)

    async def _heard(self, what: str) -> None:
        if what == self.dies_at:
            self.dead.set()
        await asyncio.sleep(0)
        if self.dead.is_set():
            raise LinkLostError("its process has ended")
        self.told.append(what)

    async def begin(self, tasks: Sequence[GroupTask]) -> None:
        await self._heard("begin")
        self.groups += [task.group for task in tasks]

    async def news(self) -> News:
        await self.dead.wait()
        raise LinkLostError("its process has ended")

    async def cancel(self, groups: Collection[int]) -> None:
        await self._heard("cancel")

    async def forget(self, groups: Collection[int]) -> None:
        await self._heard("forget")

    async def hold(self) -> None:
        await self._heard("hold")

    async def idle(self) -> None:
        await self._heard("idle")

    async def release(self) -> None:
        await self._heard("release")

    async def cut(self, servers: Sequence[ServerEndpoint]) -> None:
        await self._heard("cut")

    async def write(self, step: int, groups: Collection[int]) -> None:
        await self._heard("write")

    async def evaluate(self, rows: Sequence[int], step: int) -> EvalFacts:
        await self._heard("evaluate")
        return eval_facts(rows)


def with_links(
    make: Callable[[], Sequence[FakeLink]], go: Callable[[Links, list[FakeLink], list[int]], Awaitable[T]]
) -> T:
    """What `go` gives of links, collectors, and the list of those that were found dead."""

    async def run() -> T:
        collectors, lost = list(make()), list[int]()

        async def told(owner: int, news: News) -> None:
            raise AssertionError("nobody has news")

        async def found(owner: int) -> None:
            lost.append(owner)

        def fault(error: BaseException) -> None:
            raise error

        links = Links(collectors, told, found, fault)
        try:
            return await asyncio.wait_for(go(links, collectors, lost), 10)
        finally:
            await links.close()

    return asyncio.run(run())


def task(group: int) -> GroupTask:
    return GroupTask(group, row=0, step=1, first=0, count=1)


def test_what_a_collector_dies_of_is_made_anew_once() -> None:
    """Whoever is told of the death has all of its groups made anew; its successor must not begin them once more."""

    async def go(links: Links, collectors: list[FakeLink], lost: list[int]) -> list[int]:
        await links.begin(0, [task(7)])
        assert lost == [0]
        await links.begin(0, [task(8)])  # after the death: nobody else makes it
        new = FakeLink()
        await links.replace(0, new)
        return new.groups

    assert with_links(lambda: [FakeLink(dies_at="begin")], go) == [8]


def test_what_is_dropped_while_it_waits_for_a_collector_is_not_begun() -> None:
    async def go(links: Links, collectors: list[FakeLink], lost: list[int]) -> list[int]:
        await links.died(0)
        await links.died(0)  # told by several
        assert lost == [0]
        await links.begin(0, [task(1), task(2)])
        await links.cancel(0, [1])
        new = FakeLink()
        await links.replace(0, new)
        return new.groups

    assert with_links(lambda: [FakeLink()], go) == [2]


def test_an_evaluation_goes_on_with_the_successor_of_the_only_collector() -> None:
    async def go(links: Links, collectors: list[FakeLink], lost: list[int]) -> list[int]:
        asked = asyncio.create_task(links.evaluate(range(3), 1))
        while not lost:
            await asyncio.sleep(0)
        assert not asked.done()
        await links.replace(0, FakeLink())
        return [int(row) for facts in await asked for row in facts.rows]

    assert with_links(lambda: [FakeLink(dies_at="evaluate")], go) == [0, 1, 2]


def test_all_are_told_although_one_dies_of_it() -> None:
    async def go(links: Links, collectors: list[FakeLink], lost: list[int]) -> None:
        await links.cut([])
        assert (lost, collectors[1].told) == ([0], ["cut"])
        new = FakeLink()
        await links.replace(0, new)
        assert new.told == ["hold"]  # as the others, until all are released
        await links.release()
        assert new.told == ["hold", "release"] and collectors[1].told == ["cut", "release"]

    with_links(lambda: [FakeLink(dies_at="cut"), FakeLink()], go)
