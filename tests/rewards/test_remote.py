from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from megarl.core.errors import MegarlError
from megarl.rewards.grade import Grade, Item
from megarl.rewards.http import JsonClient
from megarl.rewards.remote import RemoteGrader
from tests.support.fake_graders import DROP, HANG, FakeRemote

T = TypeVar("T")


def talk(
    fake_with: Callable[[], FakeRemote],
    call: Callable[[RemoteGrader, FakeRemote], Awaitable[T]],
    *,
    batch: int = 32,
    concurrency: int = 64,
    timeout_s: float = 20.0,
    retries: int = 2,
) -> T:
    async def go() -> T:
        async with fake_with() as fake:
            client = JsonClient(fake.url, None, timeout_s=timeout_s, retries=retries, backoff_s=0.001)
            grader = RemoteGrader(client, batch=batch, concurrency=concurrency)
            try:
                return await call(grader, fake)
            finally:
                await grader.close()

    return asyncio.run(go())


async def grade_all(grader: RemoteGrader, responses: list[str]) -> list[Grade]:
    return await asyncio.gather(*(grader.grade(Item("p", response, "a", {"n": 1})) for response in responses))


def length(item: dict[str, Any]) -> float:
    return len(item["response"]) / 4


def test_grades_come_back_to_those_who_asked_in_few_requests() -> None:
    async def call(grader: RemoteGrader, fake: FakeRemote) -> tuple[list[Grade], list[int]]:
        grades = await grade_all(grader, ["x" * n for n in range(100)])
        return grades, [len(body["items"]) for body in fake.bodies]

    grades, sizes = talk(lambda: FakeRemote(score=length), call)
    assert grades == [Grade(n / 4) for n in range(100)]
    assert sorted(sizes) == [4, 32, 32, 32]


def test_an_item_has_everything_that_a_rule_gets() -> None:
    async def call(grader: RemoteGrader, fake: FakeRemote) -> Any:
        await grader.grade(Item("p\0é", "r", "a", {"rubric": [1, None]}, truncated=True))
        return fake.bodies

    item = {"prompt": "p\0é", "response": "r", "answer": "a", "metadata": {"rubric": [1, None]}, "truncated": True}
    assert talk(FakeRemote, call) == [{"items": [item]}]


def test_one_response_waits_only_a_moment_for_others() -> None:
    async def call(grader: RemoteGrader, fake: FakeRemote) -> float:
        await grader.start()  # the connection is there
        seconds = []
        for _ in range(20):
            began = time.perf_counter()
            await grader.grade(Item("p", "r", "a"))
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    assert talk(FakeRemote, call) < 0.02


def test_requests_in_flight_are_bounded_and_what_waits_goes_together() -> None:
    async def call(grader: RemoteGrader, fake: FakeRemote) -> tuple[list[Grade], int, int]:
        grades = await grade_all(grader, ["x" * n for n in range(64)])
        return grades, len(fake.bodies), fake.most_in_flight

    # Both requests are held until there are two, so that a bound that did not hold would be seen.
    found = talk(lambda: FakeRemote(score=length, wait_for=2), call, batch=8, concurrency=2)
    assert found == ([Grade(n / 4) for n in range(64)], 8, 2)


def test_what_is_no_number_fails_alone() -> None:
    scores = {"a": 0.5, "b": None, "c": "1.0", "d": math.nan, "e": True, "f": [1]}
    grades = talk(
        lambda: FakeRemote(score=lambda item: scores[item["response"]]), lambda g, _: grade_all(g, list(scores))
    )
    assert [grade.failure for grade in grades] == [
        None,
        "not a number: None",
        "not a number: '1.0'",
        "not a number: nan",
        None,
        "not a number: [1]",
    ]
    assert [grades[0].reward, grades[4].reward] == [0.5, 1.0]


@pytest.mark.parametrize("answer", ['{"rewards": [1.0]}', "[1.0, 2.0]", '{"reward": [1.0, 2.0]}', '{"rewards": 2}'])
def test_an_answer_of_another_shape_is_a_failure_that_shows_it(answer: str) -> None:
    grades = talk(lambda: FakeRemote((200, answer)), lambda g, _: grade_all(g, ["a", "b"]))
    assert len({grade.failure for grade in grades}) == 1
    assert 'wanted is {"rewards": [2 numbers]}, and the server answered' in str(grades[0].failure)


def test_a_batch_fails_whole_and_the_others_do_not() -> None:
    async def call(grader: RemoteGrader, fake: FakeRemote) -> list[Grade]:
        return await grade_all(grader, ["a", "b"]) + await grade_all(grader, ["c", "d"])

    grades = talk(lambda: FakeRemote((400, "no")), call)
    assert [grade.failure is None for grade in grades] == [False, False, True, True]
    grades = talk(lambda: FakeRemote(HANG), call, timeout_s=1.0)
    assert [str(grade.failure).partition(":")[0] for grade in grades] == ["timeout", "timeout", "None", "None"]
    assert [grade.failure for grade in talk(lambda: FakeRemote((502, ""), DROP), call)] == [None] * 4


def test_the_deadline_does_not_count_the_wait_for_a_turn() -> None:
    grades = talk(
        lambda: FakeRemote(HANG, HANG),
        lambda g, _: grade_all(g, ["a", "b", "c"]),
        batch=1,
        concurrency=1,
        timeout_s=1.0,
    )
    assert [grade.failure is None for grade in grades] == [False, False, True]


def test_at_the_start_the_server_has_to_speak_the_protocol() -> None:
    async def call(grader: RemoteGrader, fake: FakeRemote) -> Any:
        await grader.start()
        return fake.bodies

    assert talk(FakeRemote, call) == [{"items": []}]
    with pytest.raises(MegarlError, match="answered 404: nothing here"):
        talk(lambda: FakeRemote((404, "nothing here")), call)
    with pytest.raises(MegarlError, match=r'wanted is \{"rewards": \[0 numbers\]\}'):
        talk(lambda: FakeRemote((200, "{}")), call)


def test_nobody_waits_for_ever_where_the_client_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("broken")

    async def call(grader: RemoteGrader, _: FakeRemote) -> list[Any]:
        asked = [grader.grade(Item("", str(n), "")) for n in range(3)]
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), timeout=60)

    monkeypatch.setattr(JsonClient, "post", broken)
    assert [str(each) for each in talk(FakeRemote, call, batch=1)] == ["broken"] * 3


def test_a_caller_that_gives_up_harms_nobody() -> None:
    async def call(grader: RemoteGrader, _: FakeRemote) -> list[Grade]:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(grader.grade(Item("", "a", "")), timeout=0.05)
        return await grade_all(grader, ["b"])

    assert talk(lambda: FakeRemote(HANG), call) == [Grade(1.0)]


def test_what_is_given_up_before_it_was_sent_is_not_graded() -> None:
    async def call(grader: RemoteGrader, fake: FakeRemote) -> list[str]:
        grading = [asyncio.create_task(grader.grade(Item("p", name, "a"))) for name in ("sent", "given up", "waits")]
        while not fake.bodies:
            await asyncio.sleep(0)
        grading[1].cancel()
        await asyncio.gather(*grading, return_exceptions=True)
        return [item["response"] for body in fake.bodies for item in body["items"]]

    assert talk(lambda: FakeRemote(HANG), call, batch=1, concurrency=1, timeout_s=1.0) == ["sent", "waits"]


def test_closing_refuses_what_is_under_way_and_what_waits() -> None:
    async def call(grader: RemoteGrader, fake: FakeRemote) -> list[Any]:
        tasks = [asyncio.create_task(grader.grade(Item("", str(n), ""))) for n in range(3)]
        while not fake.bodies:
            await asyncio.sleep(0)
        await grader.close()
        with pytest.raises(MegarlError, match="closed"):
            await grader.grade(Item("", "", ""))
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = talk(lambda: FakeRemote(HANG), call, batch=1, concurrency=1)
    assert [str(each) for each in found] == ["the remote grader is closed"] * 3
