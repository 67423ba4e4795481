from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from megarl.core.errors import MegarlError
from megarl.recipe.reward import Judge
from megarl.rewards.grade import Grade, Item
from megarl.rewards.http import JsonClient
from megarl.rewards.judge import JudgeForm
from megarl.rewards.question import compile_template
from megarl.rewards.single import SingleGrader
from tests.support.fake_graders import HANG, FakeJudge

T = TypeVar("T")


def talk(fake_with: Callable[[], FakeJudge], call: Callable[[SingleGrader, FakeJudge], Awaitable[T]], **keys: Any) -> T:
    settings = Judge(kind="judge", url="http://unused", model="m", **keys)

    async def go() -> T:
        async with fake_with() as fake:
            client = JsonClient(f"{fake.url}/chat/completions", None, timeout_s=settings.timeout_s, retries=1)
            form = JudgeForm(settings, compile_template(settings.template, "template"))
            grader = SingleGrader(client, form, settings.concurrency)
            try:
                return await call(grader, fake)
            finally:
                await grader.close()

    return asyncio.run(go())


async def one(grader: SingleGrader, _: FakeJudge) -> Grade:
    return await grader.grade(Item("1+1?", "two", "2", {"rubric": "be kind"}))


def test_a_response_is_graded_by_the_reply() -> None:
    def reply(question: str) -> str:
        return f"Reasons.\nScore: {7 if question == '1+1?|two|2|be kind' else 0}"

    template = "{{ prompt }}|{{ response }}|{{ answer }}|{{ metadata.rubric }}"
    assert talk(lambda: FakeJudge(reply=reply), one, template=template) == Grade(0.7)
    assert talk(lambda: FakeJudge(reply=lambda _: '{"s": 3}'), one, parse="json:s", scale=4.0) == Grade(0.75)


def test_the_request_is_what_openai_compatible_servers_take() -> None:
    async def call(grader: SingleGrader, fake: FakeJudge) -> Any:
        await one(grader, fake)
        return fake.paths, fake.bodies

    message = [{"role": "user", "content": "two"}]
    paths, bodies = talk(FakeJudge, call, template="{{ response }}")
    assert paths == ["/v1/chat/completions"]
    assert bodies == [{"model": "m", "messages": message, "temperature": 0.0}]
    _, bodies = talk(FakeJudge, call, template="{{ response }}", temperature=None, max_tokens=9)
    assert bodies == [{"model": "m", "messages": message, "max_tokens": 9}]


def test_a_reply_without_a_score_is_a_failure() -> None:
    grade = talk(lambda: FakeJudge(reply=lambda _: "I would rather not say."), one)
    assert grade == Grade(0.0, "no score: the judge replied 'I would rather not say.'")


def test_a_reply_that_the_server_cut_off_is_a_failure() -> None:
    def graded(reason: str) -> Grade:
        choice = {"message": {"content": "Were it right:\nScore: 10"}, "finish_reason": reason}
        return talk(lambda: FakeJudge((200, json.dumps({"choices": [choice]}))), one)

    cut = graded("length")
    assert cut.failure is not None and cut.failure.startswith("no score: the reply was cut off")
    assert graded("stop") == Grade(1.0)


@pytest.mark.parametrize(
    "answer", [{}, [], {"choices": []}, {"choices": [{"message": {"content": None}}]}, {"error": "overloaded"}]
)
def test_an_answer_without_a_reply_is_a_failure_that_shows_it(answer: object) -> None:
    grade = talk(lambda: FakeJudge((200, json.dumps(answer))), one)
    assert grade.failure is not None and grade.failure.endswith(f"answered without a reply: {answer!r}")


def test_a_hang_is_a_failure_and_a_busy_server_is_asked_again() -> None:
    grade = talk(lambda: FakeJudge(HANG), one, timeout_s=0.1)
    assert grade.failure is not None and grade.failure.startswith("timeout: no answer from http://127.0.0.1")
    assert talk(lambda: FakeJudge((429, "slower", {"Retry-After": "0"})), one) == Grade(1.0)


def test_a_row_that_the_template_does_not_go_with_fails_alone() -> None:
    async def call(grader: SingleGrader, _: FakeJudge) -> list[Grade]:
        return [await grader.grade(Item("", "", "", metadata)) for metadata in ({}, {"rubric": "r"})]

    without, with_it = talk(FakeJudge, call, template="{{ metadata.rubric }}")
    assert without.failure is not None and "the template does not go with this row" in without.failure
    assert with_it == Grade(1.0)


def test_questions_in_flight_are_bounded() -> None:
    async def call(grader: SingleGrader, fake: FakeJudge) -> tuple[list[Grade], int]:
        return await asyncio.gather(*(one(grader, fake) for _ in range(12))), fake.most_in_flight

    assert talk(lambda: FakeJudge(wait_for=3), call, concurrency=3) == ([Grade(1.0)] * 12, 3)


def test_at_the_start_the_judge_has_to_answer_whatever_it_says() -> None:
    async def call(grader: SingleGrader, fake: FakeJudge) -> int:
        await grader.start()
        return len(fake.bodies)

    assert talk(lambda: FakeJudge(reply=lambda _: "Yes."), call, template="{{ metadata.rubric }}") == 1
    with pytest.raises(MegarlError, match="answered 404: no such model"):
        talk(lambda: FakeJudge((404, "no such model")), call)
