"""Servers that generate beside the ranks: what they are asked, and how long they had nothing to do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.data.prompts import PromptSet
from megarl.recipe.schema import Recipe
from tests.models.configs import PLAIN
from tests.rollout.samples import make_prompt
from tests.rollout.test_collector import make_recipe
from tests.support.fake_sglang import FakeSglang
from tests.support.rollout import LocalRollout

HELD_S = 0.4


def beside(recipe: Recipe, call: Callable[[LocalRollout, FakeSglang], Awaitable[None]], **prompt: Any) -> None:
    """A conversation with an asynchronous rollout of eight prompts."""
    prompts = PromptSet(tuple(replace(make_prompt(f"p{i}"), **prompt) for i in range(8)), 0)

    async def go() -> None:
        async with FakeSglang() as fake:
            rollout = LocalRollout(recipe, model=PLAIN, prompts=prompts, server=fake.endpoint, beside=True)
            await rollout.start()
            try:
                await asyncio.wait_for(call(rollout, fake), 30.0)
            finally:
                await rollout.close()

    asyncio.run(go())


def recipe_of(folder: Path, staleness: int) -> Recipe:
    """Two prompts of two samples a step, and four steps."""
    rollout = {"prompts_per_step": 2, "max_staleness": staleness}
    return make_recipe(folder, rollout=rollout, train={"steps": 4}, algorithm={"correction": {}})


async def asked(fake: FakeSglang, count: int) -> None:
    """Until so many requests have come; no more come in the next moment."""
    while len(fake.bodies("/generate")) < count:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    assert len(fake.bodies("/generate")) == count


def test_servers_are_at_work_while_a_request_has_no_answer(tmp_path: Path) -> None:
    async def call(rollout: LocalRollout, fake: FakeSglang) -> None:
        await rollout.generate(1, 0)
        await asked(fake, 8)  # step 1, and step 2 ahead of it
        fake.gate = asyncio.Event()
        await rollout.coordinator.release(1)  # two more groups: nothing is told of them until they have answers
        await asyncio.sleep(HELD_S)
        _, info = await rollout.generate(2, 1)
        assert info.metrics["perf/servers_idle"] < 0.5
        fake.gate.set()

    beside(recipe_of(tmp_path, 1), call)


def test_groups_of_the_next_step_are_asked_for_with_its_weights(tmp_path: Path) -> None:
    async def call(rollout: LocalRollout, fake: FakeSglang) -> None:
        await rollout.generate(1, 0)
        await asked(fake, 8)
        await rollout.coordinator.release(1)
        await asked(fake, 12)  # while an evaluation or a checkpoint comes before the step
        await rollout.coordinator.next(2, 1)
        await asked(fake, 12)
        for step in (3, 4):
            await rollout.generate(step, step - 1)
        await asked(fake, 16)  # no more than four steps need

    beside(recipe_of(tmp_path, 1), call)


def test_a_synchronous_run_asks_when_the_step_begins(tmp_path: Path) -> None:
    async def call(rollout: LocalRollout, fake: FakeSglang) -> None:
        await rollout.generate(1, 0)
        await rollout.coordinator.release(1)
        await asked(fake, 4)

    beside(recipe_of(tmp_path, 0), call)


@pytest.mark.parametrize(("own", "most"), [(None, 8), (5, 5), (100, 8)])
def test_a_rows_own_bound_is_below_the_recipes(tmp_path: Path, own: int | None, most: int) -> None:
    async def call(rollout: LocalRollout, fake: FakeSglang) -> None:
        await rollout.generate(1, 0)
        assert {body["sampling_params"]["max_new_tokens"] for body in fake.bodies("/generate")} == {most}

    beside(recipe_of(tmp_path, 0), call, max_response_tokens=own)
