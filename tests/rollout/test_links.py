"""Collectors that die: what they had goes to others, or waits for the one that comes in their place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from bench.support.rollout_simulation import FakeCollector, World
from bench.support.virtual_time import run_virtual
from megarl.rollout.links import Links
from megarl.rollout.tasks import GroupTask, News

WORLD = World(slots=2, mean_tokens=10.0, sigma=0.0)


def task(group: int) -> GroupTask:
    return GroupTask(group, row=group, step=1, first=0, count=1)


class Told:
    """What links tell. lost: what happens then."""

    def __init__(self) -> None:
        self.finished: list[tuple[int, int]] = []
        self.lost: list[int] = []
        self.faults: list[BaseException] = []
        self.on_lost: Callable[[int], None] = lambda owner: None

    async def news(self, owner: int, news: News) -> None:
        self.finished += [(owner, facts.group) for facts in news.finished]

    async def death(self, owner: int) -> None:
        self.lost.append(owner)
        self.on_lost(owner)

    def open(self, *fakes: FakeCollector) -> Links:
        return Links(fakes, self.news, self.death, self.faults.append)


def test_what_is_posted_for_a_dead_collector_waits_for_its_replacement() -> None:
    async def go() -> None:
        told, fakes = Told(), [FakeCollector(WORLD), FakeCollector(WORLD)]
        links = told.open(*fakes)
        await asyncio.sleep(0)
        fakes[0].die()
        await asyncio.sleep(1)
        assert (told.lost, links.living()) == ([0], [1])
        for owner in (0, 1):
            links.post(owner, task(owner))
        await links.flush()
        await links.cancel(0, [7])
        await asyncio.sleep(1)
        assert told.finished == [(1, 1)]
        await links.replace(0, FakeCollector(WORLD))
        await asyncio.sleep(1)
        assert told.finished == [(1, 1), (0, 0)]
        await links.close()

    run_virtual(go())


@pytest.mark.parametrize("after", [False, True])
def test_a_collector_that_dies_as_it_is_told_has_lost_its_groups_once(after: bool) -> None:
    async def go() -> None:
        told, other = Told(), FakeCollector(WORLD)
        links = told.open(FakeCollector(WORLD, dies_at=1, dies_after=after), other)
        told.on_lost = lambda owner: links.post(1, task(0))
        links.post(0, task(0))
        await links.flush()
        await links.flush()
        new = FakeCollector(WORLD)
        await links.replace(0, new)
        await asyncio.sleep(1)
        assert (told.lost, told.finished, new.asked) == ([0], [(1, 0)], [])
        await links.close()

    run_virtual(go())


def test_one_that_comes_while_all_are_held_begins_nothing() -> None:
    async def go() -> None:
        told = Told()
        links = told.open(FakeCollector(WORLD))
        await links.hold()
        await links.replace(0, FakeCollector(WORLD))
        links.post(0, task(0))
        await links.flush()
        await asyncio.sleep(5)
        assert not told.finished
        await links.release()
        await asyncio.sleep(1)
        assert told.finished == [(0, 0)]
        await links.close()

    run_virtual(go())


@pytest.mark.parametrize("dying", [[0], [0, 1]])
def test_an_evaluation_survives_deaths(dying: list[int]) -> None:
    async def go() -> list[int]:
        told = Told()
        fakes = [FakeCollector(WORLD, dies_at=1 if owner in dying else None, dies_after=True) for owner in range(2)]
        links = told.open(*fakes)
        evaluating = asyncio.create_task(links.evaluate(range(9), 1))
        await asyncio.sleep(3)
        for owner in dying:
            await links.replace(owner, FakeCollector(WORLD))
        found = [row for part in await evaluating for row in part.rows.tolist()]
        await links.close()
        return sorted(found)

    assert run_virtual(go()) == list(range(9))


def test_what_a_listener_meets_is_told() -> None:
    class Broken(FakeCollector):
        async def news(self) -> Any:
            raise ValueError("a grader broke")

    async def go() -> list[BaseException]:
        told = Told()
        links = told.open(Broken(WORLD))
        await asyncio.sleep(1)
        await links.close()
        return told.faults

    [error] = run_virtual(go())
    assert str(error) == "a grader broke"
