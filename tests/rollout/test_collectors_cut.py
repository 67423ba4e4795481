"""Collectors and a server that cuts requests off: nothing of a response is lost, and every token says who wrote it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from aiohttp import web

from megarl.core.types import Sample, Shard
from megarl.data.prompts import PromptSet
from megarl.rollout.collector import Collector
from megarl.rollout.seeds import request_seed
from tests.models.configs import PLAIN
from tests.rollout.samples import make_prompt
from tests.rollout.test_collector import make_recipe
from tests.support.fake_sglang import END, FakeSglang, generation
from tests.support.rollout import LocalRollout

T = TypeVar("T")
PROMPTS, TOKEN_S = 8, 0.004


def response(prompt: int, seed: int) -> list[int]:
    """What the model says to a prompt with a seed, however it is asked."""
    return [20 + (prompt * 7 + seed + at) % 50 for at in range(4 + seed % 20)] + [END]


class SlowSglang(FakeSglang):
    """Generates token by token; an abort ends what runs with what there is. version: of its weights."""

    version = 0

    def __init__(self) -> None:
        super().__init__()
        self._abort = asyncio.Event()

    async def respond(self, path: str, body: dict[str, Any]) -> web.Response:
        if path == "/abort_request":
            self._abort.set()
            self._abort = asyncio.Event()
            return web.json_response({})
        if path != "/generate":
            return await super().respond(path, body)
        ids, params, aborted = body["input_ids"], body["sampling_params"], self._abort
        left = response(ids[0], params["sampling_seed"])[len(ids) - 3 :][: params["max_new_tokens"]]
        made: list[int] = []
        while len(made) < len(left) and not aborted.is_set():
            await asyncio.sleep(TOKEN_S)
            made.append(left[len(made)])
        finish = "stop" if made == left else "abort"
        return web.json_response(generation(made, finish=finish, version=self.version, text="42"))


def collect(
    folder: Path, call: Callable[[LocalRollout, SlowSglang], Awaitable[T]], collectors: int = 1, **rollout: Any
) -> T:
    sizes = {"prompts_per_step": 4, "samples_per_prompt": 2, "max_response_tokens": 32, "concurrency": 12}
    recipe = make_recipe(folder, rollout=sizes | rollout, train={"steps": 3})

    async def go() -> T:
        async with SlowSglang() as fake:
            local = LocalRollout(
                recipe,
                model=PLAIN,
                prompts=PromptSet(tuple(make_prompt(f"p{at}") for at in range(PROMPTS)), 0),
                server=fake.endpoint,
                num_shards=2,
                num_collectors=collectors,
                beside=recipe.rollout.max_staleness > 0,
            )
            await local.start()
            try:
                return await call(local, fake)
            finally:
                await local.close()

    return asyncio.run(go())


def samples_of(local: LocalRollout, groups: tuple[int, ...]) -> list[Sample]:
    return [
        sample
        for collector in local.collectors
        for group in groups
        if group in collector._groups
        for sample in collector._groups[group].samples
    ]


def arrays(shards: list[Shard]) -> list[np.ndarray]:
    micros = [micro for shard in shards for mini in shard.mini_batches for micro in mini.micro_batches]
    names = ("tokens", "labels", "cu_seqlens", "loss_mask", "weights", "rollout_logprobs", "sample_index")
    return [getattr(micro, name) for micro in micros for name in names]


def test_steps_are_the_same_to_the_bit_with_any_number_of_collectors(tmp_path: Path) -> None:
    async def call(local: LocalRollout, fake: SlowSglang) -> list[np.ndarray]:
        found = arrays((await local.generate(1, 0))[0])
        fake.version = 1
        return found + arrays((await local.generate(2, 1))[0])

    one, *more = (collect(tmp_path, call, count) for count in (1, 2, 3))
    for other in more:
        assert len(one) == len(other)
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@pytest.mark.parametrize("collectors", [1, 2])
def test_what_a_sync_cuts_off_goes_on_token_for_token(tmp_path: Path, collectors: int) -> None:
    async def call(local: LocalRollout, fake: SlowSglang) -> list[Sample]:
        found: list[Sample] = []
        for step in (1, 2, 3):
            await local.generate(step, step - 1)
            found += samples_of(local, local.coordinator.samples.taken)
            await asyncio.sleep(4 * TOKEN_S)
            await local.coordinator.cut([fake.endpoint])
            assert fake.in_flight == 0
            fake.version = step
        return found

    samples = collect(tmp_path, call, collectors, max_staleness=1)
    assert len(samples) == len({sample.id for sample in samples}) == 24
    for sample in samples:
        step, prompt, index = sample.id.split("/")
        seed = request_seed(make_recipe(tmp_path).run.seed, "train", int(step), prompt, int(index))
        assert sample.response_ids.tolist() == response(int(sample.prompt.token_ids[0]), seed)
        assert [span.start for span in sample.versions] == [0, *(span.end for span in sample.versions[:-1])]
        assert sample.versions[-1].end == len(sample.response_ids)
    assert any([span.version for span in sample.versions] in ([0, 1], [1, 2]) for sample in samples)


def test_a_collector_is_replaced_in_the_middle_of_a_run(tmp_path: Path) -> None:
    async def call(local: LocalRollout, fake: SlowSglang) -> list[int]:
        taken = []
        for step in (1, 2, 3):
            fake.version = step - 1
            making = asyncio.create_task(local.generate(step, step - 1))
            if step == 2:
                await asyncio.sleep(3 * TOKEN_S)
                await local.replace(0)
            _, info = await making
            assert info.num_samples == 8
            taken += local.coordinator.samples.taken
            await local.coordinator.cut([fake.endpoint])
        assert local.coordinator.ledger.lost > 0
        return taken

    assert len(set(collect(tmp_path, call, 2, max_staleness=1))) == 12


def test_what_nobody_foresaw_ends_the_step_and_is_not_waited_for(tmp_path: Path) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise ValueError("broken")

    async def call(local: LocalRollout, _: SlowSglang) -> None:
        local.collectors[0]._graders.grade = broken  # type: ignore[method-assign,assignment]
        await asyncio.wait_for(local.generate(1, 0), 10)

    with pytest.raises(ValueError, match=r"^broken$"):  # and no group of errors, of each of the samples one
        collect(tmp_path, call)

    async def evaluated(local: LocalRollout, _: SlowSglang) -> None:
        [collector] = local.collectors
        assert isinstance(collector, Collector)
        collector._graders.grade = broken  # type: ignore[method-assign,assignment]
        collector._eval_prompts = (make_prompt("p0"), make_prompt("p1"))
        await collector.evaluate([0, 1], 1)

    with pytest.raises(ValueError, match=r"^broken$"):
        collect(tmp_path, evaluated)
