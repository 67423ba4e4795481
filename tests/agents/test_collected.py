"""Steps and evaluations of episodes, as a coordinator and its collectors make them: numbers, files, and syncs in mid-episode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from aiohttp import web

from megarl.agents.environment import Done, EpisodeRow, Message, Response, Turn
from megarl.agents.episode import Episodes, EpisodeSettings
from megarl.agents.tool_use import ToolUse
from megarl.agents.tools import Toolbox
from megarl.core.metrics import check_names
from megarl.core.types import Prompt, Sample, Status
from megarl.data.blocks import laid
from megarl.data.prompts import MESSAGES_KEY, PromptSet
from megarl.recipe.schema import Recipe
from megarl.rollout.journal import JOURNAL, Journal, Written
from tests.agents.fake_policy import FakePolicy
from tests.agents.forms import ends_of, make_tokenizer
from tests.agents.playing import make_settings
from tests.agents.test_tokens import assert_exact
from tests.agents.test_tools import FakeReader
from tests.models.configs import PLAIN
from tests.rollout.test_collector import make_recipe
from tests.support.fake_sglang import FakeSglang, generation
from tests.support.rollout import LocalRollout

T = TypeVar("T")
TOKENIZER = make_tokenizer("qwen3")
END = ends_of("qwen3")[0]


class ByRow:
    """Rows of one turn, of two, or that fail; what the policy writes does not matter."""

    def __init__(self) -> None:
        self.turns = 1

    async def start(self, row: EpisodeRow) -> list[Message]:
        self.turns = row.fields["turns"]
        if row.fields.get("fails"):
            raise ValueError("out of doors")
        return list(row.messages)

    async def step(self, response: Response) -> Turn | Done:
        await asyncio.sleep(0)
        if response.turn + 1 == self.turns:
            return Done(float(response.token_ids[0] % 2), {"solved": float(self.turns == 2)})
        return Turn([{"role": "user", "content": "on"}], 0.5)

    async def close(self) -> None:
        pass


def row(number: int, **fields: Any) -> Prompt:
    content = "x" * (number + 1)
    metadata = {"turns": 1 + number % 2, **fields, MESSAGES_KEY: [{"role": "user", "content": content}]}
    ids = TOKENIZER(content)["input_ids"]
    return Prompt(f"p{number}", np.array([1, *ids], np.int32), content, "42", metadata)


def episodes(folder: Path, **sections: Any) -> tuple[Recipe, EpisodeSettings]:
    sizes = {"prompts_per_step": 4, "samples_per_prompt": 2, "max_response_tokens": 200, "temperature": 1.0}
    sections["rollout"] = sizes | sections.get("rollout", {})
    sections = {"agent": {"environment": "tests.agents.test_collected:ByRow"}, "reward": {"fn": None}} | sections
    return make_recipe(folder, **sections), make_settings(ByRow, TOKENIZER)


def collect(
    recipe: Recipe,
    settings: EpisodeSettings,
    fake: FakeSglang,
    call: Callable[[LocalRollout], Awaitable[T]],
    rows: tuple[Prompt, ...] = tuple(row(number) for number in range(4)),
    **changes: Any,
) -> T:
    async def go() -> T:
        async with fake:
            local = LocalRollout(
                recipe,
                model=PLAIN,
                prompts=PromptSet(rows, 0),
                eval_prompts=[row(0), row(1)],
                server=fake.endpoint,
                num_shards=2,
                player=Episodes(settings),
                **changes,
            )
            await local.start()
            try:
                return await call(local)
            finally:
                await local.close()

    return asyncio.run(asyncio.wait_for(go(), 60))


def policy(tokens: tuple[int, ...] = (5,), **changes: Any) -> FakePolicy:
    return FakePolicy(lambda *_: [*tokens, END], lambda ids: TOKENIZER.decode(ids), ends={END}, **changes)


class AtVersion(FakePolicy):
    """All answers are of one version of the weights, as those of a synchronous step have to be."""

    def _write(self, body: dict[str, Any]) -> Any:
        self.version = -1
        return super()._write(body)


def test_a_step_of_episodes_has_their_numbers_and_can_be_read(tmp_path: Path) -> None:
    recipe, settings = episodes(tmp_path, report={"samples": 3})
    fake = AtVersion(lambda *_: [5, END], lambda ids: TOKENIZER.decode(ids), ends={END})
    rows = (row(0), row(1), row(2), row(3, fails=True))
    shards, info = collect(recipe, settings, fake, lambda local: local.generate(1, 0), rows)
    between = len(settings.template.following([{"role": "user", "content": "on"}], [END]))
    check_names(info.metrics)
    # Two episodes of each row: of one turn, of two, of one; the last row's failed.
    assert (info.num_samples, info.num_groups) == (6, 3)
    agent = {
        name: value for name, value in info.metrics.items() if name.startswith("agent/") and not name.endswith("_s")
    }
    assert agent == {
        "agent/turns_mean": pytest.approx(4 / 3),
        "agent/turns_max": 2.0,
        "agent/policy_tokens": pytest.approx(2 * 4 / 3),
        "agent/environment_tokens": pytest.approx(between / 3),
        "agent/environment_failures": 2.0,
        "agent/truncated_by/turns": 0.0,
        "agent/truncated_by/tokens": 0.0,
        "agent/truncated_by/time": 0.0,
        "agent/by/solved": pytest.approx(1 / 3),
    }
    assert info.metrics["reward/mean"] == pytest.approx((1 + 1.5 + 1) / 3)
    assert info.metrics["reward/by/environment/mean"] == pytest.approx(3.5 / 3)
    assert info.metrics["rollout/failed"] == 2
    assert info.response_tokens == 4 * 2 + 2 * (4 + between)
    trained = sum(
        float(micro.loss_mask.sum()) for shard in shards for mini in shard.mini_batches for micro in mini.micro_batches
    )
    assert trained == 2 * (2 + 4 + 2), "what the environment said is not trained on"
    lines = [json.loads(line) for line in (tmp_path / "run/samples/step_000001.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == ["1/p0/0", "1/p0/1", "1/p1/0", "1/p3/0"]  # the first that raised as well
    assert [message["role"] for message in lines[2]["messages"]] == ["user", "assistant", "user", "assistant"]
    assert lines[2]["turn_rewards"] == [0.5, 1.0] and lines[2]["numbers"]["turns"] == 2 and "response" not in lines[2]
    assert lines[3]["failure"] == "the environment failed: start raised ValueError: out of doors"
    assert "Traceback" in lines[3]["trace"] and lines[3]["reward"] is None


def test_the_first_episode_that_its_environment_fails_is_told_of_at_once(tmp_path: Path) -> None:
    recipe, settings = episodes(tmp_path)
    fake = AtVersion(lambda *_: [5, END], lambda ids: TOKENIZER.decode(ids), ends={END})

    async def call(local: LocalRollout) -> list[str]:
        await local.generate(1, 0)
        [collector] = local.collectors
        lines = [await collector.notices.next()]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(collector.notices.next(), 0.05)
        return lines

    [line] = collect(recipe, settings, fake, call, (row(0), row(1), row(2, fails=True), row(3, fails=True)))
    assert line == "the episode 1/p2/0 failed: the environment failed: start raised ValueError: out of doors"


def test_held_out_episodes_are_played_and_counted(tmp_path: Path) -> None:
    recipe, settings = episodes(tmp_path, data={"train": tmp_path / "a", "eval": tmp_path / "b"})
    fake = AtVersion(lambda *_: [5, END], lambda ids: TOKENIZER.decode(ids), ends={END})
    result = collect(recipe, settings, fake, lambda local: local.evaluate(2, 0))
    check_names(result.metrics)
    assert (result.num_samples, result.reward, result.accuracy) == (2, 1.25, 1.0)
    assert result.metrics["eval/turns_mean"] == 1.5 and result.metrics["eval/by/solved"] == 0.5
    assert fake.bodies("/generate")[0]["sampling_params"]["temperature"] == 0.0


def test_graders_grade_the_whole_conversation_beside_the_environment(tmp_path: Path) -> None:
    recipe, settings = episodes(tmp_path, reward={"fn": "tests.agents.grader:turns"})
    fake = AtVersion(lambda *_: [5, END], lambda ids: TOKENIZER.decode(ids), ends={END})

    async def call(local: LocalRollout) -> Any:
        await local.generate(1, 0)
        return [group.samples for group in local.collectors[0]._groups.values()]

    samples = [sample for group in collect(recipe, settings, fake, call) for sample in group]
    for sample in samples:
        turns = sample.numbers["turns"]
        assert sample.reward_parts == {"environment": 1.0 + 0.5 * (turns == 2), "turns": turns}
        assert sample.reward == sum(value or 0.0 for value in sample.reward_parts.values())


def test_where_nobody_but_graders_rewards_only_they_are_named(tmp_path: Path) -> None:
    agent = {"tools": ["tests.agents.toolkit:multiply"], "tool_parser": "qwen25"}
    reward = {"fn": "tests.agents.grader:turns"}
    recipe, _ = episodes(tmp_path, agent=agent, reward=reward, actor={"micro_batch_tokens": 4096})
    fake = AtVersion(lambda *_: [5, END], lambda ids: TOKENIZER.decode(ids), ends={END})

    async def go() -> dict[str, float]:
        async with fake:
            opened = Episodes.open(recipe, fake.endpoint, TOKENIZER)
            parser = FakeReader()
            settings = replace(opened._settings, tools=ToolUse(Toolbox([], 1.0), parser), max_prompt_tokens=1000)
            local = LocalRollout(
                recipe,
                model=PLAIN,
                prompts=PromptSet(tuple(row(number) for number in range(4)), 0),
                server=fake.endpoint,
                player=Episodes(settings),
            )
            await local.start()
            try:
                return (await local.generate(1, 0))[1].metrics
            finally:
                await local.close()

    metrics = asyncio.run(asyncio.wait_for(go(), 60))
    assert metrics["reward/mean"] == metrics["reward/by/turns/mean"] == 1.0
    assert "reward/by/environment/mean" not in metrics and metrics["agent/tool_calls"] == 0.0


def test_the_journal_has_episodes_as_they_were(tmp_path: Path) -> None:
    """With the first messages of each, which are no row's, and its conversation."""
    recipe, settings = episodes(tmp_path, train={"steps": 1, "journal": True})
    fake = AtVersion(lambda *_: [5, END], lambda ids: TOKENIZER.decode(ids), ends={END})

    async def call(local: LocalRollout) -> tuple[list[Sample], Written | None]:
        await local.generate(1, 0)
        [made] = [group for group in local.collectors[0]._groups.values() if group.task.row == 1]
        journal = Journal(recipe.run.folder / JOURNAL)
        try:
            return made.samples, await journal.find(made.task, row(1))
        finally:
            await journal.close()

    made, found = collect(recipe, settings, fake, call)
    assert found is not None and len(made) == len(found.samples) == 2
    for one, other in zip(made, found.samples, strict=True):
        assert one.prompt.token_ids.tolist() == other.prompt.token_ids.tolist() != row(1).token_ids.tolist()
        assert one.memory is not None and other.memory is not None and one.memory.tobytes() == other.memory.tobytes()
        assert (one.metadata, one.numbers, one.versions) == (other.metadata, other.numbers, other.versions)
        assert one.numbers["turns"] == 2 and len(one.metadata["messages"]) == 4


def test_split_episodes_go_through_a_step_and_the_journal(tmp_path: Path) -> None:
    """Their sequences lie apart in the shards, wherever a collector has them; the journal has them to the bit."""
    recipe, settings = episodes(tmp_path, train={"steps": 1, "journal": True})
    thought = TOKENIZER("<think>5</think>", add_special_tokens=False)["input_ids"]
    fake = AtVersion(lambda *_: [*thought, 5, END], lambda ids: TOKENIZER.decode(ids), ends={END})

    async def call(local: LocalRollout) -> tuple[Any, list[Sample], Written | None]:
        made = await local.generate(1, 0)
        [group] = [group for group in local.collectors[0]._groups.values() if group.task.row == 1]
        journal = Journal(recipe.run.folder / JOURNAL)
        try:
            return made, group.samples, await journal.find(group.task, row(1))
        finally:
            await journal.close()

    (shards, info), made, found = collect(recipe, replace(settings, split=True), fake, call)
    assert info.num_samples == 8 and info.metrics["agent/sequences"] == 1.5
    micros = [micro for shard in shards for mini in shard.mini_batches for micro in mini.micro_batches]
    placed = {
        tuple(micro.tokens[first:last]): (micro.loss_mask[first:last].tolist(), int(index))
        for micro in micros
        for (first, last), index in zip(pairwise(micro.cu_seqlens), micro.sample_index, strict=True)
    }
    for context, sampled, *_ in fake.turns:
        mask, _ = placed[(*context, *sampled)]
        assert mask == [0] * (len(context) - 1) + [1] * len(sampled) + [0]
    assert sum(len(micro.sample_index) for micro in micros) == 12, "four episodes of one turn, and four of two"
    assert found is not None and len(found.samples) == len(made) == 2
    for one, other in zip(made, found.samples, strict=True):
        assert len(one.starts) == 1 and other.starts == one.starts
        assert laid(one).memory.tobytes() == other.memory.tobytes()  # type: ignore[union-attr]


def test_prompts_of_a_group_may_differ(tmp_path: Path) -> None:
    """Each episode's own first messages are its prompt."""
    recipe, settings = episodes(tmp_path)
    lengths = iter(range(100))

    class Differs(ByRow):
        async def start(self, row: EpisodeRow) -> list[Message]:
            await super().start(row)
            return [{"role": "user", "content": "x" * next(lengths)}]

    fake = AtVersion(lambda *_: [5, END], lambda ids: TOKENIZER.decode(ids), ends={END})
    shards, info = collect(recipe, replace(settings, make=Differs), fake, lambda local: local.generate(1, 0))
    assert info.num_samples == 8
    assert sum(shard.num_tokens for shard in shards) == info.num_tokens
    frame = len(settings.template.prompt([{"role": "user", "content": ""}])[0])
    assert info.prompt_tokens == 8 * frame + sum(range(8))


class SlowPolicy(FakePolicy):
    """Takes a while for each token; an abort ends what runs with what there is."""

    def __init__(self, *what: Any, **changes: Any) -> None:
        super().__init__(*what, **changes)
        self._abort = asyncio.Event()
        self.served = self.running = 0

    async def respond(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/abort_request":
            self._abort.set()
            self._abort = asyncio.Event()
        if path != "/generate":
            return await super().respond(path, body)
        aborted = self._abort
        ids = self._writes(body["input_ids"], body["sampling_params"]["max_new_tokens"])
        made: list[int] = []
        self.running += 1
        while len(made) < len(ids) and not aborted.is_set():
            await asyncio.sleep(0.003)
            made.append(ids[len(made)])
        self.running -= 1
        cut = made != ids
        logprobs = [-1.0 - index for index in range(len(made))]
        self.turns.append((body["input_ids"], made, logprobs, self.served, cut))
        finish = "abort" if cut else "stop"
        return web.json_response(generation(made, finish=finish, version=self.served, text=self._decode(made)))


def test_a_sync_in_the_middle_of_episodes_loses_no_token_and_every_token_says_who_wrote_it(tmp_path: Path) -> None:
    # Few at a time: while one step is taken, episodes of the next are played.
    rollout = {"max_staleness": 1, "in_flight": "abort", "concurrency": 5}
    recipe, settings = episodes(tmp_path, rollout=rollout, train={"steps": 3, "journal": False})
    fake = SlowPolicy(lambda *_: [5, 6, 7, 8, 9, END], lambda ids: TOKENIZER.decode(ids), ends={END})

    async def call(local: LocalRollout) -> list[Sample]:
        found: list[Sample] = []
        for step in (1, 2, 3):
            await local.generate(step, step - 1)
            taken = local.coordinator.samples.taken
            found += [sample for group in taken for sample in local.collectors[0]._groups[group].samples]
            while step < 3 and not fake.running:
                await asyncio.sleep(0.001)
            await local.coordinator.cut([fake.endpoint])
            assert fake.in_flight == 0
            fake.served = step
        return found

    samples = collect(recipe, settings, fake, call, beside=True)
    assert len(samples) == 24 and all(sample.status is Status.COMPLETED for sample in samples)
    assert any(cut for *_, cut in fake.turns)
    for sample in samples:
        ids = [*sample.prompt.token_ids.tolist(), *sample.response_ids.tolist()]
        own = [turn for turn in fake.turns if ids[: len(turn[0])] == turn[0]]
        assert own
        spans = sample.versions
        covered = sum(span.end - span.start for span in spans)
        assert covered == sample.loss_mask.sum()
        assert all(sample.loss_mask[span.start : span.end].all() for span in spans)
    assert any(len({span.version for span in sample.versions}) > 1 for sample in samples)


def test_tokens_are_exact_through_a_collector(tmp_path: Path) -> None:
    recipe, settings = episodes(
        tmp_path, rollout={"prompts_per_step": 1, "samples_per_prompt": 1}, algorithm={"advantage": "reinforce_pp"}
    )
    fake = AtVersion(lambda *_: [5, 6, END], lambda ids: TOKENIZER.decode(ids), ends={END})

    async def call(local: LocalRollout) -> Sample:
        await local.generate(1, 0)
        [group] = local.collectors[0]._groups.values()
        return group.samples[0]

    assert_exact(collect(recipe, settings, fake, call, (row(1),)), fake)
