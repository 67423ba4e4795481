"""The collector against a fake server and a real grader process: counts, numbers, and what happens when things fail."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from megarl.core.errors import MegarlError
from megarl.core.metrics import check_names
from megarl.core.progress import Progress
from megarl.core.types import EvalResult, Prompt
from megarl.data.prompts import PromptSet
from megarl.models.flops import train_flops
from megarl.recipe.schema import Recipe
from megarl.rewards.combine import Graders
from megarl.rewards.grade import Item
from megarl.rollout import collector as collector_module
from megarl.rollout.collector import Collector
from megarl.rollout.producer import Pace
from megarl.rollout.seeds import request_seed
from megarl.serving.client import ServerEndpoint
from tests.models.configs import PLAIN
from tests.rollout.samples import make_prompt
from tests.support.fake_graders import FakeJudge, FakeRemote, in_thread
from tests.support.fake_sglang import END, FakeSglang, generation
from tests.support.rollout import LocalRollout

T = TypeVar("T")


def make_recipe(folder: Path, **sections: dict[str, Any]) -> Recipe:
    """Four prompts of two samples a step, in the file's order."""
    defaults: dict[str, dict[str, Any]] = {
        "run": {"dir": folder, "name": "run"},
        "model": {"path": folder / "model"},
        "data": {"train": folder / "train.jsonl", "shuffle": False},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_response_tokens": 8},
        "reward": {"fn": "exact"},
        "algorithm": {"normalize_std": False},
        "actor": {"micro_batch_tokens": 64},
        "train": {"steps": 1},
    }
    return Recipe.model_validate(
        {**defaults, **{name: {**defaults.get(name, {}), **s} for name, s in sections.items()}}
    )


def collect(
    fake_with: Callable[[], FakeSglang],
    recipe: Recipe,
    call: Callable[[LocalRollout, FakeSglang], Awaitable[T]],
    collectors: int = 1,
) -> T:
    """Run one conversation with a collector of four prompts and two held-out ones."""
    prompts = PromptSet(tuple(make_prompt(f"p{i}") for i in range(4)), 3)

    async def go() -> T:
        async with fake_with() as fake:
            collector = LocalRollout(
                recipe,
                model=PLAIN,
                prompts=prompts,
                eval_prompts=[make_prompt("p8"), make_prompt("p9")],
                server=fake.endpoint,
                num_shards=2,
                num_collectors=collectors,
            )
            await collector.start()
            try:
                return await call(collector, fake)
            finally:
                await collector.close()

    return asyncio.run(go())


def alternating() -> FakeSglang:
    """Prompt 0 is answered right and wrong in turn, prompt 1 always right, the others never; prompt 3 runs too long."""
    seen: dict[int, int] = {}

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        first = body["input_ids"][0]
        seen[first] = seen.get(first, 0) + 1
        right = first in (11, 18) or (first == 10 and seen[first] % 2)
        tokens = [5] * 8 if first == 13 else [5, END]
        return generation(tokens, finish="length" if first == 13 else "stop", text="42" if right else "41")

    return FakeSglang(answer=answer)


def test_a_step_has_the_counts_and_numbers_of_its_samples(tmp_path: Path) -> None:
    async def call(collector: LocalRollout, _: FakeSglang) -> Any:
        return await collector.generate(1, 0), collector.advantages(1, {}).columns["advantages"]

    (shards, info), columns = collect(alternating, make_recipe(tmp_path), call)
    assert (info.step, info.weight_version, info.num_samples, info.num_groups) == (1, 0, 8, 4)
    assert (info.prompt_tokens, info.response_tokens) == (24, 6 * 2 + 2 * 8)
    assert info.metrics["reward/mean"] == pytest.approx(3 / 8)
    assert info.metrics["reward/std"] == pytest.approx((3 / 8 * 5 / 8) ** 0.5)
    assert info.metrics["rollout/truncated"] == 2 / 8
    assert info.metrics["rollout/zero_variance_groups"] == 3 / 4
    assert info.metrics["rollout/response_len_mean"] == (6 * 2 + 2 * 8) / 8
    assert info.metrics["rollout/response_len_max"] == 8
    assert info.metrics["data/epoch"] == 1.0
    assert info.metrics["data/dropped_prompts"] == 3
    # Prompts of 3 tokens; three of them have answers of 2, the last of 8, and each has two samples.
    assert info.metrics["perf/train_flops"] == train_flops(PLAIN, [5] * 6 + [11] * 2)
    check_names(info.metrics)
    # Group 0 was right once: its samples are 0.5 above and below their mean; nothing else has an advantage.
    found: dict[int, set[float]] = {}
    for shard, column in zip(shards, columns, strict=True):
        for micro, values in zip(shard.mini_batches[0].micro_batches, column[0], strict=True):
            bounds = zip(micro.sample_index, micro.cu_seqlens, micro.cu_seqlens[1:], strict=False)
            for sample, start, end in bounds:
                trained = micro.loss_mask[start:end] > 0
                assert (values[start:end][~trained] == 0).all()
                found[int(sample)] = set(values[start:end][trained].tolist())
    assert found == {0: {0.5}, 1: {-0.5}, **{sample: {0.0} for sample in range(2, 8)}}


@pytest.mark.parametrize("reduction", ["token-mean", "sequence-mean"])
def test_answers_that_were_cut_off_are_left_out_of_the_loss_and_their_rewards_are_not(
    reduction: str, tmp_path: Path
) -> None:
    """Of prompt 3 both answers were: each of the other six has two tokens."""

    def weights_of(truncated: str) -> tuple[list[float], dict[str, float]]:
        given = {"truncated": truncated, "reduction": reduction}
        recipe = make_recipe(tmp_path / truncated, algorithm=given)
        shards, info = collect(alternating, recipe, lambda c, _: c.generate(1, 0))
        micros = [micro for shard in shards for micro in shard.mini_batches[0].micro_batches]
        masks = np.concatenate([micro.loss_mask for micro in micros])
        weights = np.concatenate([micro.weights for micro in micros])
        assert (weights[masks == 0] == 0).all()
        return weights[masks > 0].tolist(), dict(info.metrics)

    (all_of_them, before), (others, after) = weights_of("learn"), weights_of("mask")
    assert (len(all_of_them), len(others)) == (6 * 2 + 2 * 8, 6 * 2)
    assert sum(all_of_them) == pytest.approx(1) and others == pytest.approx([1 / 12] * 12)
    for name in ("reward/mean", "rollout/truncated", "rollout/response_len_mean"):
        assert before[name] == after[name]


def test_samples_are_written_for_reading(tmp_path: Path) -> None:
    collect(alternating, make_recipe(tmp_path, report={"samples": 3}), lambda c, _: c.generate(12, 0))
    rows = [json.loads(line) for line in (tmp_path / "run/samples/step_000012.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["12/p0/0", "12/p0/1", "12/p1/0"]
    assert rows[0] == {
        "id": "12/p0/0",
        "reward": 1.0,
        "parts": {"exact": 1.0},
        "status": "completed",
        "response_tokens": 2,
        "prompt": "text of p0",
        "response": "42",
        "answer": "42",
    }
    assert not list((tmp_path / "run/samples").glob(".*"))


def test_groups_without_variance_are_dropped_on_request_and_counted(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, algorithm={"normalize_std": False, "drop_zero_variance_groups": True})
    _, info = collect(alternating, recipe, lambda c, _: c.generate(1, 0))
    assert (info.num_samples, info.num_groups) == (2, 1)
    assert info.metrics["rollout/zero_variance_groups"] == 3 / 4
    assert info.metrics["reward/mean"] == pytest.approx(3 / 8)


def short_and_long() -> FakeSglang:
    """Wrong answers of 2 and of 8 tokens, in turn."""
    seen = iter(range(100))
    return FakeSglang(answer=lambda _: generation([5, END] if next(seen) % 2 else [5] * 8, finish="stop", text="41"))


def advantages_of(tmp_path: Path, fake: Callable[[], FakeSglang] = alternating, **algorithm: Any) -> dict[int, float]:
    """Sample -> its advantage."""

    async def call(collector: LocalRollout, _: FakeSglang) -> Any:
        return (await collector.generate(1, 0))[0], collector.advantages(1, {}).columns["advantages"]

    shards, columns = collect(fake, make_recipe(tmp_path, algorithm=algorithm), call)
    found: dict[int, float] = {}
    for shard, column in zip(shards, columns, strict=True):
        for micro, values in zip(shard.mini_batches[0].micro_batches, column[0], strict=True):
            for sample, start, end in zip(micro.sample_index, micro.cu_seqlens, micro.cu_seqlens[1:], strict=False):
                if sample >= 0:
                    [found[int(sample)]] = set(values[start:end][micro.loss_mask[start:end] > 0].tolist())
    return found


@pytest.mark.parametrize(
    ("name", "expected"), [("rloo", 1.0), ("opo", 0.5), ("gpg", 0.5 * 8 / 2), ("reinforce_pp_baseline", None)]
)
def test_the_recipe_chooses_the_advantage(name: str, expected: float | None, tmp_path: Path) -> None:
    settings = {"normalize_std": False} if name == "gpg" else {}
    found = advantages_of(tmp_path, advantage=name, **settings)
    # Group 0 alone has a right and a wrong answer, of the same length.
    assert found[0] == -found[1] > 0
    assert expected is None or found[0] == pytest.approx(expected)
    assert all(found[sample] == 0 for sample in range(2, 8))


def test_remax_asks_each_prompt_once_more_greedily(tmp_path: Path) -> None:
    def greedy_is_right() -> FakeSglang:
        """Right where it is greedy, wrong where it samples."""
        return FakeSglang(
            answer=lambda body: generation(
                [5, END], finish="stop", text="42" if body["sampling_params"]["temperature"] == 0 else "41"
            )
        )

    assert set(advantages_of(tmp_path, greedy_is_right, advantage="remax").values()) == {-1.0}


def test_groups_that_teach_nothing_are_replaced_by_further_prompts(tmp_path: Path) -> None:
    def last_prompts_teach() -> FakeSglang:
        """Prompts 2 and 3 are answered right and wrong in turn, the others never right."""
        turn = {12: iter(["42", "41"]), 13: iter(["42", "41"])}

        def answer(body: dict[str, Any]) -> dict[str, Any]:
            return generation([5, END], finish="stop", text=next(turn.get(body["input_ids"][0], iter(["41"]))))

        return FakeSglang(answer=answer)

    async def call(collector: LocalRollout, fake: FakeSglang) -> Any:
        return await collector.generate(1, 0), len(fake.bodies("/generate"))

    algorithm = {"normalize_std": False, "drop_zero_variance_groups": True, "refill_rounds": 3}
    recipe = make_recipe(tmp_path, algorithm=algorithm, rollout={"prompts_per_step": 2})
    (_, info), asked = collect(last_prompts_teach, recipe, call)
    # Two prompts that teach nothing, then two in their place that do: the step is full after one round.
    assert (info.num_groups, info.num_samples, asked) == (2, 4, 8)


def test_answers_near_the_length_limit_lose_reward(tmp_path: Path) -> None:
    # 8 tokens are allowed: the long answer loses 1, the short one nothing.
    found = advantages_of(tmp_path, short_and_long, advantage="rloo", overlong_buffer=0.5)
    assert sorted(found.values()) == [-1.0] * 4 + [1.0] * 4
    assert set(advantages_of(tmp_path / "without", short_and_long, advantage="rloo").values()) == {0.0}


def test_requests_in_flight_are_bounded(tmp_path: Path) -> None:
    recipe = make_recipe(
        tmp_path, rollout={"prompts_per_step": 4, "samples_per_prompt": 2, "max_response_tokens": 8, "concurrency": 3}
    )

    async def call(collector: LocalRollout, fake: FakeSglang) -> int:
        await collector.generate(1, 0)
        return fake.most_in_flight

    assert collect(alternating, recipe, call) == 3


def test_a_sample_is_graded_while_others_are_still_generated(tmp_path: Path) -> None:
    def fake() -> FakeSglang:
        made = alternating()
        made.gate = asyncio.Event()
        return made

    async def call(collector: LocalRollout, server: FakeSglang) -> None:
        gate = server.gate
        assert gate is not None
        server.gate = None  # the first request is answered at once, those after it wait
        step = asyncio.create_task(collector.generate(1, 0))
        while not server.calls:
            await asyncio.sleep(0)
        server.gate = gate
        await asyncio.wait_for(graded.wait(), 10)
        assert not step.done()
        gate.set()
        await step

    graded = asyncio.Event()
    original = Graders.grade

    class Watched(Graders):
        async def grade(self, *what: Any, **more: Any) -> Any:
            grade = await original(self, *what, **more)
            graded.set()
            return grade

    recipe = make_recipe(
        tmp_path, rollout={"prompts_per_step": 4, "samples_per_prompt": 2, "max_response_tokens": 8, "concurrency": 2}
    )
    prompts = PromptSet(tuple(make_prompt(f"p{i}") for i in range(4)), 0)

    async def go() -> None:
        async with fake() as server:
            collector = LocalRollout(recipe, model=PLAIN, prompts=prompts, server=server.endpoint, graders=Watched)
            await collector.start()
            try:
                await call(collector, server)
            finally:
                await collector.close()

    asyncio.run(go())


def test_graders_are_told_which_rows_are_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of one name in two folders have rows of the same ids, and a grader's messages name no more."""
    rows: list[str] = []
    original = Graders.grade

    async def watched(self: Graders, item: Item, *more: Any) -> Any:
        rows.append(item.row)
        return await original(self, item, *more)

    async def both(collector: LocalRollout, _: FakeSglang) -> None:
        await collector.generate(1, 0)
        await collector.evaluate(1, 0)

    monkeypatch.setattr(Graders, "grade", watched)
    collect(alternating, make_recipe(tmp_path), both)
    assert sorted(set(rows)) == ["p0", "p1", "p2", "p3", "p8 (held out)", "p9 (held out)"]


def test_failed_samples_are_counted_and_left_out(tmp_path: Path) -> None:
    def fake() -> FakeSglang:
        def answer(body: dict[str, Any]) -> dict[str, Any]:
            return generation([5], finish="abort" if body["input_ids"][0] == 11 else "stop", text="42")

        return FakeSglang(answer=answer)

    _, info = collect(fake, make_recipe(tmp_path), lambda c, _: c.generate(1, 0))
    assert info.num_samples == 6
    assert info.metrics["rollout/failed"] == 2
    assert info.metrics["reward/mean"] == 1.0
    rows = [json.loads(line) for line in (tmp_path / "run/samples/step_000001.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows].count("failed") == 2
    assert [row["reward"] for row in rows] == [None if row["status"] == "failed" else 1.0 for row in rows]
    assert info.failure.startswith("2 of 8 samples failed; the first: the server aborted it")
    assert "aborted" in next(row["failure"] for row in rows if row["status"] == "failed")


async def step_and_evaluation(collector: LocalRollout, _: FakeSglang) -> Any:
    _, info = await collector.generate(1, 0)
    return info, await collector.evaluate(1, 0)


def test_a_function_is_told_which_responses_ended_at_a_limit_in_steps_and_evaluations(tmp_path: Path) -> None:
    """Both to the first prompt, and that to the first held-out one."""

    def fake() -> FakeSglang:
        return FakeSglang(
            answer=lambda body: generation([5], finish="length" if body["input_ids"][0] in cut else "stop")
        )

    cut = {make_prompt(name).token_ids[0] for name in ("p0", "p8")}
    info, held_out = collect(
        fake, make_recipe(tmp_path, reward={"fn": "tests.rollout.grader:whole"}), step_and_evaluation
    )
    assert (info.metrics["reward/mean"], info.metrics["rollout/truncated"]) == (6 / 8, 2 / 8)
    assert held_out.metrics["eval/reward"] == 1 / 2


def test_what_a_function_says_beside_its_score_is_a_metric_of_steps_and_evaluations(tmp_path: Path) -> None:
    """Samples are right 3 times of 8 and off by one otherwise; of the held-out ones, p8 is right and p9 is not."""

    info, held_out = collect(
        alternating, make_recipe(tmp_path, reward={"fn": "tests.rollout.grader:figured"}), step_and_evaluation
    )
    figures = {name: value for name, value in info.metrics.items() if name.startswith("reward/by/figured/")}
    assert {name.rpartition("/")[2]: value for name, value in figures.items()} == {
        "mean": pytest.approx(3 / 8),
        "std": pytest.approx((3 / 8 * 5 / 8) ** 0.5),
        "failures": 0.0,
        "off": pytest.approx(5 / 8),
        "even": 1.0,
    }
    assert {name: held_out.metrics[name] for name in ("eval/by/figured/off", "eval/by/figured/even")} == {
        "eval/by/figured/off": 0.5,
        "eval/by/figured/even": 1.0,
    }
    check_names([*info.metrics, *held_out.metrics])
    lines = (tmp_path / "run" / "samples" / "step_000001.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["figures"] == {"figured/even": 1.0, "figured/off": 0.0}


def test_a_grader_that_raises_is_counted_apart_from_a_zero(tmp_path: Path) -> None:
    def fake() -> FakeSglang:
        return FakeSglang(answer=lambda body: generation([5, END], text="7" if body["input_ids"][0] != 12 else "raise"))

    recipe = make_recipe(tmp_path, reward={"fn": "tests.rollout.grader:picky"})
    _, info = collect(fake, recipe, lambda c, _: c.generate(1, 0))
    assert info.metrics["reward/failures"] == 2
    assert info.num_samples == 6
    assert info.metrics["reward/mean"] == 7.0
    assert info.failure.startswith(
        "2 of 8 samples failed; the first: grader picky: error: ValueError: could not convert"
    )
    rows = [json.loads(row) for row in (tmp_path / "run/samples/step_000001.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == [7.0] * 4 + [None] * 2 + [7.0] * 2


def test_grades_that_fail_are_bounded(tmp_path: Path) -> None:
    def fake() -> FakeSglang:
        # Of the step's samples 2 of 8 have no grade, of the held-out ones all.
        return FakeSglang(
            answer=lambda body: generation([5, END], text="raise" if body["input_ids"][0] in (12, 18, 19) else "7")
        )

    def with_share(share: float, call: Callable[[LocalRollout, FakeSglang], Awaitable[T]]) -> T:
        reward = {"fn": "tests.rollout.grader:picky", "max_failed_share": share}
        return collect(fake, make_recipe(tmp_path, reward=reward), call)

    assert with_share(0.25, lambda c, _: c.generate(1, 0))[1].num_samples == 6
    with pytest.raises(
        MegarlError, match=r"Step 1: 2 of 8 grades failed, .*_share is 0\.24\. The first: picky: error: Val"
    ):
        with_share(0.24, lambda c, _: c.generate(1, 0))
    assert (tmp_path / "run/samples/step_000001.jsonl").exists(), "what was said is there to be read"
    with pytest.raises(MegarlError, match=r"Evaluation at step 3: 2 of 2 grades failed"):
        with_share(0.5, lambda c, _: c.evaluate(3, 0))
    result = with_share(1.0, lambda c, _: c.evaluate(3, 0))
    assert result.accuracy == 0 and result.failure.startswith("2 of 2 samples failed; the first: grader picky")


def graded_by(
    recipe_with: Callable[[str, str], Recipe],
    remote: FakeRemote,
    judge: FakeJudge,
    call: Callable[[LocalRollout, FakeSglang], Awaitable[T]],
) -> T:
    """`collect`, beside a reward server and a judge whose addresses the recipe is made with."""
    with in_thread(remote, judge):
        return collect(alternating, recipe_with(remote.url, judge.url), call)


def with_graders(folder: Path, remote: str, judge: str, **sections: dict[str, Any]) -> Recipe:
    common = {"timeout_s": 10.0, "retries": 0, "key_env": "GRADERS_KEY"}
    graders = {
        "right": {"kind": "rule", "fn": "exact", "weight": 2.0},
        "far": {"kind": "remote", "url": remote, "weight": 0.5, **common},
        "style": {"kind": "judge", "url": judge, "model": "m", "weight": -1.0, **common},
    }
    return make_recipe(folder, reward={"graders": graders}, **sections)


@pytest.fixture
def graders_key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("GRADERS_KEY", "secret-of-the-test")
    return "secret-of-the-test"


@pytest.mark.parametrize("left", [None, "samples/step_000001.jsonl", "journal/step_000001-ab.sqlite"])
def test_graders_of_a_run_that_goes_on_were_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str | None
) -> None:
    recipe, known = make_recipe(tmp_path), []

    def opened(*_: object, **keys: bool) -> Graders:
        known.append(keys["known"])
        return Graders({})

    monkeypatch.setattr(Graders, "open", opened)
    monkeypatch.setattr(collector_module, "load_tokenizer", lambda *_: None)
    monkeypatch.setattr(collector_module, "load_model_config", lambda _: PLAIN)
    monkeypatch.setattr(collector_module, "load_prompts", lambda *_, **__: PromptSet((make_prompt("p0"),), 0))
    if left is not None:
        (recipe.run.folder / left).parent.mkdir(parents=True)
        (recipe.run.folder / left).touch()

    async def go() -> None:
        await Collector.open(recipe, ServerEndpoint("router", "http://127.0.0.1:9", "")).close()

    asyncio.run(go())
    assert known == [left is not None]


def test_several_graders_give_a_weighted_sum_and_are_logged_by_themselves(tmp_path: Path, graders_key: str) -> None:
    # The reward server cannot grade prompt 2, the judge does not know what to say of prompt 3.
    remote = FakeRemote(score=lambda item: None if item["prompt"] == "text of p2" else 0.4)
    judge = FakeJudge(reply=lambda question: "Hm." if "text of p3" in question else "Score: 5")
    _, info = graded_by(
        lambda *urls: with_graders(tmp_path, *urls), remote, judge, lambda collector, _: collector.generate(1, 0)
    )
    # What is left is prompt 0, right and wrong, and prompt 1, right twice.
    right, wrong = 2.0 * 1 + 0.5 * 0.4 - 0.5, 0.5 * 0.4 - 0.5
    assert info.num_samples == 4
    assert info.metrics["reward/mean"] == pytest.approx((3 * right + wrong) / 4)
    assert info.metrics["reward/failures"] == 4
    assert {name: value for name, value in info.metrics.items() if name.startswith("reward/by/")} == pytest.approx(
        {
            "reward/by/right/mean": 3 / 4,
            "reward/by/right/std": (3 / 4 * 1 / 4) ** 0.5,
            "reward/by/right/failures": 0,
            "reward/by/far/mean": 0.4,
            "reward/by/far/std": 0,
            "reward/by/far/failures": 2,
            "reward/by/style/mean": 0.5,
            "reward/by/style/std": 0,
            "reward/by/style/failures": 2,
        }
    )
    text = (tmp_path / "run/samples/step_000001.jsonl").read_text()
    rows = {row["id"]: row for row in map(json.loads, text.splitlines())}
    assert rows["1/p1/0"]["parts"] == {"right": 1.0, "far": 0.4, "style": 0.5}
    assert rows["1/p1/0"]["reward"] == pytest.approx(right)
    assert rows["1/p2/0"]["parts"] == {"right": 0.0, "far": None, "style": 0.5}
    assert (rows["1/p2/0"]["reward"], rows["1/p2/0"]["grade_failure"]) == (None, "far: not a number: None")
    assert "style: no score: the judge replied 'Hm.'" in rows["1/p3/0"]["grade_failure"]
    assert graders_key not in text and set(remote.keys) == set(judge.keys) == {f"Bearer {graders_key}"}


def test_a_step_that_nobody_can_grade_stops_with_the_first_failure(tmp_path: Path, graders_key: str) -> None:
    judge = FakeJudge(reply=lambda _: "I would rather not.")
    with pytest.raises(
        MegarlError,
        match=r"Step 1: 8 of 8 grades failed, and reward\.max_failed_share is 0\.5\. The first: style: no score",
    ):
        graded_by(lambda *urls: with_graders(tmp_path, *urls), FakeRemote(), judge, lambda c, _: c.generate(1, 0))


def test_graders_that_are_not_there_stop_the_start(tmp_path: Path, graders_key: str) -> None:
    remote, judge = FakeRemote((404, "nothing here")), FakeJudge((401, f"unknown key {graders_key}"))
    with pytest.raises(MegarlError, match=r"far \(remote\): .*answered 404: nothing here; style \(judge\)") as caught:
        graded_by(lambda *urls: with_graders(tmp_path, *urls), remote, judge, lambda c, _: c.generate(1, 0))
    assert graders_key not in str(caught.value)


def test_evaluation_may_ask_one_grader_what_is_right(tmp_path: Path, graders_key: str) -> None:
    # Prompt 8 is answered right and prompt 9 is not. The judge knows nothing of prompt 8.
    def result(folder: Path, **settings: str) -> Any:
        judge = FakeJudge(reply=lambda question: "Hm." if "text of p8" in question else "Score: 10")
        return graded_by(
            lambda *urls: with_graders(folder, *urls, eval=settings), FakeRemote(), judge, lambda c, _: c.evaluate(1, 0)
        )

    # Of the rewards one is missing and the other is 0.5 - 1; each counts as 0 answers right.
    whole = result(tmp_path)
    assert (whole.accuracy, whole.reward, whole.metrics["eval/failures"]) == (0.0, -0.25, 1.0)
    assert result(tmp_path / "right", grader="right").accuracy == 0.5
    assert result(tmp_path / "far", grader="far").accuracy == 1.0
    assert result(tmp_path / "style", grader="style").accuracy == 0.5


def test_a_step_without_any_answer_stops_with_the_reason(tmp_path: Path) -> None:
    def fake() -> FakeSglang:
        made = FakeSglang()
        made.refuse["/generate"] = (503, "no workers are available")
        return made

    with pytest.raises(MegarlError, match=r"Step 1: no sample can be used. 8 of 8 .* answered 503: no workers"):
        collect(fake, make_recipe(tmp_path), lambda c, _: c.generate(1, 0))


def test_samples_of_other_weights_stop_the_step(tmp_path: Path) -> None:
    with pytest.raises(MegarlError, match=r"weight version 0; all servers should serve version 3"):
        collect(alternating, make_recipe(tmp_path), lambda c, _: c.generate(1, 3))


def test_advantages_of_another_step_are_refused(tmp_path: Path) -> None:
    async def call(collector: LocalRollout, _: FakeSglang) -> None:
        await collector.generate(1, 0)
        collector.advantages(2, {})

    with pytest.raises(MegarlError, match="step 2 were asked for; the samples are of step 1"):
        collect(alternating, make_recipe(tmp_path), call)


def test_evaluation_counts_every_prompt(tmp_path: Path) -> None:
    result = collect(alternating, make_recipe(tmp_path, eval={"samples_per_prompt": 2}), lambda c, _: c.evaluate(5, 0))
    assert (result.num_prompts, result.num_samples) == (2, 4)
    assert (result.accuracy, result.reward) == (0.5, 0.5)
    assert result.metrics["eval/accuracy"] == 0.5
    assert result.metrics["eval/pass_at_2"] == 0.5
    check_names(result.metrics)
    assert (tmp_path / "run/samples/eval_000005.jsonl").exists()


def test_an_evaluation_tells_of_no_figures_that_nobody_counts(tmp_path: Path) -> None:
    """It said 0 of so many samples until its end, or counted those of steps that servers make meanwhile."""
    told: list[str] = []

    class Noted(Progress):
        def _write(self) -> None:
            told.append(str(self._done))

    async def call(local: LocalRollout, _: FakeSglang) -> None:
        local.coordinator._progress = Noted(None)
        await local.evaluate(1, 0)
        assert told == []
        await local.generate(1, 0)
        assert told

    collect(alternating, make_recipe(tmp_path), call)


def test_held_out_rows_have_bounds_of_their_own_too(tmp_path: Path) -> None:
    async def asked(rows: list[Prompt]) -> list[int]:
        async with FakeSglang() as fake:
            prompts = PromptSet((make_prompt("p0"),), 0)
            rollout = LocalRollout(
                make_recipe(tmp_path), model=PLAIN, prompts=prompts, eval_prompts=rows, server=fake.endpoint
            )
            await rollout.start()
            try:
                await rollout.evaluate(1, 0)
            finally:
                await rollout.close()
            return sorted(body["sampling_params"]["max_new_tokens"] for body in fake.bodies("/generate"))

    rows = [replace(make_prompt("p8"), max_response_tokens=bound) for bound in (3, 100, None)]
    assert asyncio.run(asked(rows)) == [3, 8, 8]


def test_evaluation_is_greedy_unless_told_otherwise(tmp_path: Path) -> None:
    async def call(collector: LocalRollout, fake: FakeSglang) -> Any:
        await collector.evaluate(1, 0)
        return fake.bodies("/generate")

    bodies = collect(alternating, make_recipe(tmp_path), call)
    assert {body["sampling_params"]["temperature"] for body in bodies} == {0.0}
    told = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_response_tokens": 33}
    for body in collect(alternating, make_recipe(tmp_path, eval=told), call):
        sampling = body["sampling_params"]
        assert [sampling[name] for name in ("temperature", "top_p", "top_k", "max_new_tokens")] == [0.6, 0.95, 20, 33]


def test_rows_of_a_set_are_asked_and_judged_as_the_recipe_says_of_it(tmp_path: Path) -> None:
    sets = {"b": {"samples_per_prompt": 3, "temperature": 0.9, "max_response_tokens": 7}}
    recipe = make_recipe(tmp_path, eval={"set_key": "kind", "sets": sets})
    rows = [replace(make_prompt(name), metadata={"kind": kind}) for name, kind in (("p8", "a"), ("p9", "b"))]

    async def asked() -> tuple[list[tuple[float, int]], EvalResult]:
        async with FakeSglang() as fake:
            prompts = PromptSet((make_prompt("p0"),), 0)
            rollout = LocalRollout(recipe, model=PLAIN, prompts=prompts, eval_prompts=rows, server=fake.endpoint)
            await rollout.start()
            try:
                found = await rollout.evaluate(1, 0)
            finally:
                await rollout.close()
            told = [body["sampling_params"] for body in fake.bodies("/generate")]
            return sorted((each["temperature"], each["max_new_tokens"]) for each in told), found

    told, found = asyncio.run(asked())
    assert told == [(0.0, recipe.rollout.max_response_tokens), *[(0.9, 7)] * 3]
    assert (found.num_prompts, found.num_samples) == (2, 4)
    assert {"eval/set/a/accuracy", "eval/set/b/pass_at_3"} <= found.metrics.keys()


def test_a_prompt_that_comes_twice_is_two_groups_of_other_samples(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, rollout={"prompts_per_step": 6, "samples_per_prompt": 2, "max_response_tokens": 8})
    _, info = collect(alternating, recipe, lambda c, _: c.generate(1, 0))
    assert (info.num_samples, info.num_groups) == (12, 6)
    rows = (tmp_path / "run/samples/step_000001.jsonl").read_text().splitlines()
    assert len({json.loads(row)["id"] for row in rows}) == 12


def test_the_place_in_the_data_is_kept_and_restored(tmp_path: Path) -> None:
    sizes = {"prompts_per_step": 1, "samples_per_prompt": 1, "max_response_tokens": 8}
    recipe = make_recipe(tmp_path, rollout=sizes, train={"steps": 1, "journal": False})

    async def before(collector: LocalRollout, fake: FakeSglang) -> Any:
        await collector.generate(1, 0)
        place = collector.coordinator.state()
        await collector.generate(2, 0)
        return place, [body["input_ids"][0] for body in fake.bodies("/generate")]

    place, asked = collect(alternating, recipe, before)
    assert asked == [10, 11]

    async def after(collector: LocalRollout, fake: FakeSglang) -> list[int]:
        collector.coordinator.load_state(place)
        await collector.generate(2, 0)
        return [body["input_ids"][0] for body in fake.bodies("/generate")]

    assert collect(alternating, recipe, after) == [11]


def test_a_probe_is_short_and_of_the_last_step(tmp_path: Path) -> None:
    async def call(collector: LocalRollout, _: FakeSglang) -> Any:
        before = await collector.probe()
        await collector.generate(1, 0)
        return before.rows, (await collector.probe()).rows

    before, after = collect(alternating, make_recipe(tmp_path), call)
    assert before == [[10 + i, 8, 9] for i in range(4)]
    assert after[0] == [10, 8, 9, 5, END]
    assert len(after) == 4
    assert all(np.asarray(row).dtype.kind == "i" for row in after)


def test_samples_are_handed_over_as_they_lie_and_let_go_once_they_are_trained_on(tmp_path: Path) -> None:
    async def call(rollout: LocalRollout, _: FakeSglang) -> list[Any]:
        await rollout.generate(1, 0)
        memories = [each.memory for group in rollout.collectors[0]._groups.values() for each in group.samples]
        handed = [memory for block in rollout._blocks[0] for memory in block.memories]
        assert sorted(map(id, memories)) == sorted(map(id, handed)), "a sample was copied into its block"
        kept = [weakref.ref(memory) for memory in memories]
        del memories, handed
        await rollout.generate(2, 0)
        gc.collect()
        return [each() for each in kept]

    assert collect(alternating, make_recipe(tmp_path, train={"steps": 2}), call) == [None] * 8


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_request_has_the_seed_of_its_sample(tmp_path: Path, deterministic: bool) -> None:
    rollout = {"deterministic": deterministic, "concurrency": 3}
    recipe = make_recipe(tmp_path, rollout=rollout, run={"seed": 5}, algorithm={"advantage": "remax"})

    async def go(collector: LocalRollout, _: FakeSglang) -> None:
        await collector.generate(2, 0)
        await collector.evaluate(2, 0)

    fakes: list[FakeSglang] = []

    def fake() -> FakeSglang:
        fakes.append(FakeSglang())
        return fakes[-1]

    collect(fake, recipe, go)
    bodies = [body for path, body in fakes[0].calls if path == "/generate"]
    found = sorted((body["input_ids"][0], body["sampling_params"]["sampling_seed"]) for body in bodies)
    wanted = [(10 + i, request_seed(5, "train", 2, f"p{i}", index)) for i in range(4) for index in range(2)]
    wanted += [(10 + i, request_seed(5, "greedy", 2, f"p{i}", 0)) for i in range(4)]
    wanted += [(10 + i, request_seed(5, "eval", 2, f"p{i}", 0)) for i in (8, 9)]
    assert found == sorted(wanted)
    assert len({seed for _, seed in found}) == 14
    assert all(("extra_key" in body) is deterministic for body in bodies)


def test_what_a_recipe_says_of_pace_is_what_the_producer_goes_by(tmp_path: Path) -> None:
    stale = make_recipe(tmp_path, rollout={"max_staleness": 1, "oversample": 1.5, "late": "drop"})
    assert Pace.of(stale, beside=True) == Pace(4, max_staleness=1, ahead=4, late="drop")
    assert Pace.of(stale, beside=False) == Pace(4, max_staleness=1, ahead=2, late="drop")
    dapo = make_recipe(tmp_path, algorithm={"refill_rounds": 2, "drop_zero_variance_groups": True})
    assert Pace.of(dapo, beside=False) == Pace(4, refills=8)
