"""A teacher behind an address: which tokens it is asked about, what becomes of its answers, and who waits for it how long."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from megarl.core.errors import MegarlError
from megarl.core.metrics import check_names
from megarl.core.types import Sample, Status
from megarl.data.prompts import PromptSet
from megarl.recipe.schema import Recipe
from megarl.rollout.journal import JOURNAL
from megarl.rollout.teacher import Said, ServedTeacher
from megarl.serving.client import ServerClient
from tests.models.configs import PLAIN
from tests.rollout.samples import make_prompt, make_sample
from tests.rollout.test_collector import make_recipe
from tests.support.fake_sglang import END, FakeSglang, generation
from tests.support.rollout import LocalRollout

T = TypeVar("T")
K = 2
LOGPROBS, TOP = {"teacher_logprobs": ()}, {"teacher_top": (2 * K + 1,)}


def said(position: int, token: int) -> float:
    """What the teacher of these tests says of a token: it differs by place and token."""
    return -(position + token / 100)


def scores(body: dict[str, Any], lower: float = 0.0) -> dict[str, Any]:
    """An answer of SGLang's to a request for log-probs of given tokens: rows from `logprob_start_len` on, the first of nothing.

    lower: so much less likely than `said`. The likeliest tokens at position p are p + 1 and p + 2, of the probabilities 1/2 and
    1/4.
    """
    ids, begun = body["input_ids"], body["logprob_start_len"]
    rows = [[None if at == begun else said(at, ids[at]) - lower, ids[at], None] for at in range(begun, len(ids))]
    meta: dict[str, Any] = {"input_token_logprobs": rows, "finish_reason": {"type": "length"}}
    if k := body.get("top_logprobs_num", 0):
        at = np.arange(begun + 1, len(ids))
        top, values = at[:, None] + 1 + np.arange(k), np.tile(np.log([0.5, 0.25][:k]), (len(at), 1))
        meta |= {
            "input_top_logprobs_idx_flat_b64": base64.b64encode(top.astype(np.int32).tobytes()).decode(),
            "input_top_logprobs_val_flat_b64": base64.b64encode(values.astype(np.float32).tobytes()).decode(),
            "input_top_logprobs_shape": [len(at), k],
            "input_top_logprobs_null_prefix": 1,
        }
    return {"text": "", "output_ids": [], "meta_info": meta}


def asking(
    call: Callable[[ServedTeacher, list[FakeSglang]], Awaitable[T]], servers: int = 1, **settings: Any
) -> tuple[T, list[FakeSglang], list[str]]:
    """One conversation with a teacher of so many servers, those servers, and what people were told."""
    told: list[str] = []

    async def go() -> tuple[T, list[FakeSglang]]:
        async with AsyncExitStack() as stack:
            fakes = [
                await stack.enter_async_context(FakeSglang(f"teacher server {at}", scores)) for at in range(servers)
            ]
            clients = [ServerClient(fake.endpoint) for fake in fakes]
            teacher = ServedTeacher(clients, settings.pop("columns", LOGPROBS), 128, told.append, **settings)
            try:
                return await call(teacher, fakes), fakes
            finally:
                await teacher.close()

    return *asyncio.run(go()), told


def answered(tokens: list[int], mask: list[int], starts: tuple[int, ...] = ()) -> Sample:
    """A sample behind the prompt [10, 8, 9]."""
    return replace(
        make_sample("1/p0"),
        response_ids=np.array(tokens, np.int32),
        loss_mask=np.array(mask, np.uint8),
        rollout_logprobs=np.zeros(len(tokens), np.float32),
        starts=starts,
    )


def test_only_what_is_trained_on_is_asked_about_and_given_a_number() -> None:
    """Tokens 20 and 22 stand at positions 3 and 5; what stands behind the last of them is not sent."""
    found, [fake], _ = asking(lambda teacher, _: teacher.say(answered([20, 21, 22, 23], [1, 0, 1, 0])))
    assert isinstance(found, Said) and found.failure is None
    np.testing.assert_allclose(found.columns["teacher_logprobs"], [said(3, 20), 0, said(5, 22), 0], rtol=1e-6)
    [body] = fake.bodies("/generate")
    assert (body["input_ids"], body["logprob_start_len"]) == ([10, 8, 9, 20, 21, 22], 2)
    assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}
    assert "extra_key" not in body and "top_logprobs_num" not in body


def test_each_sequence_of_an_episode_is_asked_about_by_itself() -> None:
    """The second begins at position 2 of the response, and knows nothing of what stands before it: its positions count anew."""
    sample = answered([20, 21, 30, 31, 32], [0, 1, 0, 1, 1], starts=(2,))
    found, [fake], _ = asking(lambda teacher, _: teacher.say(sample))
    expected = [0, said(4, 21), 0, said(1, 31), said(2, 32)]
    np.testing.assert_allclose(found.columns["teacher_logprobs"], expected, rtol=1e-6)
    bodies = {tuple(body["input_ids"]): body["logprob_start_len"] for body in fake.bodies("/generate")}
    assert bodies == {(10, 8, 9, 20, 21): 3, (30, 31, 32): 0}


def test_nobody_is_asked_about_what_nothing_is_trained_on() -> None:
    found, [fake], _ = asking(lambda teacher, _: teacher.say(answered([20, 21], [0, 0])))
    assert found.columns["teacher_logprobs"].tolist() == [0, 0] and fake.calls == []


def test_the_likeliest_tokens_come_with_the_probability_of_all_others() -> None:
    """Of 1/2 and 1/4 a quarter is left."""
    sample = answered([20, 21], [0, 1])
    found, [fake], _ = asking(lambda teacher, _: teacher.say(sample), columns=TOP, alone=True)
    top = found.columns["teacher_top"]
    np.testing.assert_allclose(top, [[0] * 5, [5, 6, *np.log([0.5, 0.25, 0.25])]], rtol=1e-6)
    [body] = fake.bodies("/generate")
    assert body["top_logprobs_num"] == K and len(body["extra_key"]) == 64
    assert list(found.columns) == ["teacher_top"]


def test_a_rest_of_nothing_has_a_logarithm() -> None:
    def certain(body: dict[str, Any]) -> dict[str, Any]:
        answer = scores(body)
        values = np.log(np.array([[0.75, 0.25]], np.float32))
        answer["meta_info"]["input_top_logprobs_val_flat_b64"] = base64.b64encode(values.tobytes()).decode()
        return answer

    async def call(teacher: ServedTeacher, fakes: list[FakeSglang]) -> Said:
        fakes[0].answer = certain
        return await teacher.say(answered([20], [1]))

    found, _, _ = asking(call, columns=TOP)
    assert found.columns["teacher_top"][0, -1] == pytest.approx(-23 * math.log(2))


def test_a_likely_token_beyond_the_policys_vocabulary_is_another_family() -> None:
    def beyond(body: dict[str, Any]) -> dict[str, Any]:
        answer = scores(body)
        ids = np.array([[5, 128]], np.int32)
        answer["meta_info"]["input_top_logprobs_idx_flat_b64"] = base64.b64encode(ids.tobytes()).decode()
        return answer

    async def call(teacher: ServedTeacher, fakes: list[FakeSglang]) -> Said:
        fakes[0].answer = beyond
        return await teacher.say(answered([20], [1]))

    found, _, told = asking(call, columns=TOP)
    assert found.failure and "finds token 128 likely, and the policy's vocabulary has 128" in found.failure
    assert len(told) == 1 and "the teacher said nothing of the sample 1/p0/0" in told[0]


def test_a_server_that_is_gone_is_asked_again_and_people_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.rollout.teacher.SHORTEST_PAUSE_S", 0.01)
    monkeypatch.setattr("megarl.rollout.teacher.SILENT_S", 0.005)

    async def call(teacher: ServedTeacher, fakes: list[FakeSglang]) -> Said:
        fakes[0].drop_next = 3
        return await teacher.say(answered([20], [1]))

    found, [fake], told = asking(call)
    assert found.failure is None and len(fake.calls) == 4
    assert "is asked again, for up to 600 s a sample (teacher.servers.timeout_s)" in told[0]
    assert told[1:] == ["the teacher server 0 answers again"]


def test_what_another_server_can_answer_does_not_wait_for_the_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHORTEST_PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(f"megarl.rollout.teacher.{name}", 60.0)

    async def call(teacher: ServedTeacher, fakes: list[FakeSglang]) -> list[Said]:
        fakes[0].refuse["/generate"] = (503, "loading")
        return [await teacher.say(answered([20], [1])) for _ in range(3)]

    found, [gone, well], told = asking(call, servers=2)
    assert [each.failure for each in found] == [None] * 3 and sum(each.seconds for each in found) < 60
    assert (len(gone.calls), len(well.calls)) == (1, 3) and told == []


def test_sequences_are_spread_over_the_servers_and_bounded() -> None:
    async def call(teacher: ServedTeacher, fakes: list[FakeSglang]) -> int:
        for fake in fakes:
            fake.gate = asyncio.Event()
        saying = [asyncio.create_task(teacher.say(answered([20 + at], [1]))) for at in range(8)]
        while sum(fake.in_flight for fake in fakes) < 4:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        most = sum(fake.in_flight for fake in fakes)
        for fake in fakes:
            assert fake.gate is not None
            fake.gate.set()
        await asyncio.gather(*saying)
        return most

    most, fakes, _ = asking(call, servers=2, concurrency=4)
    assert most == 4 and [fake.most_in_flight for fake in fakes] == [2, 2]


def test_past_its_deadline_the_sample_has_failed_and_says_why() -> None:
    async def call(teacher: ServedTeacher, fakes: list[FakeSglang]) -> Said:
        fakes[0].refuse["/generate"] = (500, "out of memory")
        return await teacher.say(answered([20], [1]))

    found, _, _ = asking(call, timeout_s=2.0)
    assert found.failure and "no answer within teacher.servers.timeout_s, 2 s; the last answer:" in found.failure
    assert "out of memory" in found.failure
    sample = replace(answered([20], [1]), grade_failure="math: late")
    found.put(sample)
    assert (sample.status, sample.grade_failure, sample.numbers["teacher_failures"]) == (Status.FAILED, None, 1)
    assert sample.metadata["failure"].startswith("the teacher: no answer within")


def test_a_sequence_that_the_server_refuses_is_not_asked_again() -> None:
    async def call(teacher: ServedTeacher, fakes: list[FakeSglang]) -> Said:
        fakes[0].refuse["/generate"] = (400, "The input is longer than the model's context length")
        return await teacher.say(answered([20], [1]))

    found, [fake], _ = asking(call)
    assert found.failure and "longer than the model's context" in found.failure and len(fake.calls) == 1


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda meta: meta["input_token_logprobs"].pop(), "answered to 3 tokens, and was asked with 4"),
        (lambda meta: meta["input_token_logprobs"][1].__setitem__(1, 99), "is of other tokens than it was asked about"),
        (lambda meta: meta["input_token_logprobs"][1].__setitem__(0, None), "a log-prob that is no number"),
        (lambda meta: meta["input_token_logprobs"][1].__setitem__(0, 0.5), "are above 0, or no finite numbers"),
        (lambda meta: meta.pop("input_top_logprobs_shape"), "input_top_logprobs_shape is missing"),
        (lambda meta: meta.update(input_top_logprobs_null_prefix=0), "behind 0 rows of nothing"),
        (lambda meta: meta.update(input_top_logprobs_val_flat_b64="AAAA"), "is no table of (1, 2)"),
    ],
)
def test_answers_that_are_none_fail_the_sample(wrong: Callable[[dict[str, Any]], Any], says: str) -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        made = scores(body)
        wrong(made["meta_info"])
        return made

    async def call(teacher: ServedTeacher, fakes: list[FakeSglang]) -> Said:
        fakes[0].answer = answer
        return await teacher.say(answered([20], [1]))

    found, _, _ = asking(call, columns=TOP)
    assert found.failure and says in found.failure


def test_the_last_token_of_a_vocabulary_has_another_name_in_answers() -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        made = scores(body)
        made["meta_info"]["input_token_logprobs"][1][1] = 0
        return made

    async def call(teacher: ServedTeacher, fakes: list[FakeSglang]) -> Said:
        fakes[0].answer = answer
        return await teacher.say(answered([127], [1]))

    found, _, _ = asking(call)
    np.testing.assert_allclose(found.columns["teacher_logprobs"], [said(3, 127)], rtol=1e-6)


def policy(body: dict[str, Any]) -> dict[str, Any]:
    """Answers of two and of three tokens, by the prompt, which the teacher tells apart."""
    first = body["input_ids"][0]
    return generation([20, END] if first % 2 else [20, 21, END], text="42")


def with_teacher(recipe: Recipe, call: Callable[[LocalRollout, FakeSglang], Awaitable[T]], **how: Any) -> T:
    """One conversation with two collectors whose teacher is behind an address."""

    async def go() -> T:
        async with FakeSglang(answer=policy) as fake, FakeSglang("teacher server 0", scores) as teachers:
            rollout = LocalRollout(
                recipe,
                model=PLAIN,
                prompts=PromptSet(tuple(make_prompt(f"p{at}") for at in range(4)), 0),
                eval_prompts=[make_prompt("p8")],
                server=fake.endpoint,
                num_shards=2,
                num_collectors=2,
                teacher=teachers.endpoint,
                **how,
            )
            await rollout.start()
            try:
                return await call(rollout, teachers)
            finally:
                await rollout.close()

    return asyncio.run(go())


def distilling(folder: Path, loss: str = "distill") -> Recipe:
    """A recipe whose loss asks a teacher behind an address."""
    return make_recipe(
        folder,
        algorithm={"policy_loss": loss, "distill_top_k": K, "normalize_std": True},
        teacher={"servers": {"urls": ("http://127.0.0.1:1",)}},
    )


@pytest.mark.parametrize(("loss", "name"), [("distill", "teacher_logprobs"), ("distill_top", "teacher_top")])
def test_a_steps_column_is_in_the_order_of_its_shards_and_the_same_from_the_journal(
    tmp_path: Path, loss: str, name: str
) -> None:
    recipe = distilling(tmp_path, loss)

    async def step(rollout: LocalRollout, teachers: FakeSglang) -> Any:
        shards, info = await rollout.generate(1, 0)
        return shards, await rollout.columns(), info, len(teachers.calls)

    shards, columns, info, asked = with_teacher(recipe, step)
    assert asked == 8 and info.metrics["rollout/failed"] == 0
    assert info.metrics["teacher/failures"] == 0 and 0 <= info.metrics["teacher/wait_s_mean"] < 5
    check_names(info.metrics)
    seen = 0
    for shard, column in zip(shards, columns[name], strict=True):
        for micro, values in zip(shard.mini_batches[0].micro_batches, column[0], strict=True):
            starts = np.repeat(micro.cu_seqlens[:-1], np.diff(micro.cu_seqlens))
            label_at = np.arange(len(micro.tokens)) - starts + 1  # the place of each label in its sequence
            for at in range(len(micro.tokens)):
                if not micro.loss_mask[at]:
                    assert not values[at].any()
                    continue
                seen += 1
                one = said(label_at[at], micro.labels[at])
                top = [label_at[at] + 1, label_at[at] + 2, *np.log([0.5, 0.25, 0.25])]
                np.testing.assert_allclose(values[at], one if name == "teacher_logprobs" else top, rtol=1e-6)
    assert seen == 2 * (2 + 3 + 2 + 3)
    # Again, out of the journal: the same bits, and nobody is asked.
    _, replayed, _, asked = with_teacher(recipe, step, replay=recipe.run.folder / JOURNAL)
    assert asked == 0
    for one, other in zip(columns[name], replayed[name], strict=True):
        for mini, same in zip(one, other, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(mini, same, strict=True))
    with pytest.raises(MegarlError, match=r"Nobody has asked a teacher for the teacher_"):
        other_loss = distilling(tmp_path, "distill" if loss == "distill_top" else "distill_top")
        with_teacher(other_loss, step, replay=recipe.run.folder / JOURNAL)


def test_held_out_answers_are_not_shown_to_the_teacher(tmp_path: Path) -> None:
    async def call(rollout: LocalRollout, teachers: FakeSglang) -> int:
        await rollout.evaluate(0, 0)
        return len(teachers.calls)

    assert with_teacher(distilling(tmp_path), call) == 0


def test_samples_of_which_the_teacher_says_nothing_are_left_out(tmp_path: Path) -> None:
    """The first answer of each group is refused: the step is made of the others."""

    async def call(rollout: LocalRollout, teachers: FakeSglang) -> Any:
        refused: set[int] = set()

        def answer(body: dict[str, Any]) -> dict[str, Any]:
            first = body["input_ids"][0]
            made = scores(body)
            if first not in refused:
                refused.add(first)
                made["meta_info"]["input_token_logprobs"] = []
            return made

        teachers.answer = answer
        return (await rollout.generate(1, 0))[1]

    info = with_teacher(distilling(tmp_path), call)
    assert info.num_samples == 4
    assert info.metrics["rollout/failed"] == info.metrics["teacher/failures"] == 4
    assert "4 of 8 samples failed; the first: the teacher: teacher server 0" in info.failure
