from __future__ import annotations

import asyncio
import contextlib
import datetime
import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from megarl.rewards.http import CallError, JsonClient
from tests.support.fake_graders import DROP, HANG, Act, FakeGrader

KEY = "secret-of-the-test"


async def post(fake: FakeGrader, body: object = "x", **settings: Any) -> Any:
    client = JsonClient(fake.url, **{"key": None, "timeout_s": 20.0, "retries": 3, "backoff_s": 0.001, **settings})
    try:
        return await client.post({"body": body})
    finally:
        await client.close()


def called(*script: Act, **settings: Any) -> tuple[Any, FakeGrader]:
    """What a call gave (its error as text), and the server."""

    async def go() -> tuple[Any, FakeGrader]:
        async with FakeGrader(*script) as fake:
            try:
                return await post(fake, **settings), fake
            except CallError as error:
                return str(error), fake

    return asyncio.run(go())


@pytest.mark.parametrize("body", [{(1, 2): 3}, [[...]]])
def test_what_cannot_be_sent_is_a_failure(body: Any) -> None:
    if isinstance(body, list):
        body[0][0] = body  # it holds itself
    answer, fake = called(body=body)
    assert answer.startswith("error: what would be sent is not JSON: ") and fake.bodies == []


def test_the_key_is_a_bearer_token_and_dates_are_text() -> None:
    answer, fake = called(key=KEY, body=datetime.date(2024, 2, 29))
    assert answer == {"echo": {"body": "2024-02-29"}}
    assert fake.keys == [f"Bearer {KEY}"]
    assert called(key=None)[1].keys == [None]


def test_numbers_that_are_not_finite_are_text_however_deep() -> None:
    body = [{"a": math.nan, "b": [1.5, (math.inf, datetime.date(2024, 2, 29))]}, {-math.inf: np.float64("nan")}]
    assert called(body=body)[0] == {
        "echo": {"body": [{"a": "nan", "b": [1.5, ["inf", "2024-02-29"]]}, {"-inf": "nan"}]}
    }


@pytest.mark.parametrize("act", [(500, "oops"), (503, ""), (429, "slower"), DROP, (429, "", {"Retry-After": "0"})])
def test_what_may_pass_is_tried_again(act: Act) -> None:
    answer, fake = called(act, act, act)
    assert answer == {"echo": {"body": "x"}}
    assert len(fake.bodies) == 4


def test_attempts_are_bounded_and_the_last_answer_is_shown() -> None:
    answer, fake = called((500, "a"), (500, "b"), (500, "c" * 1000), retries=2)
    assert answer == f"error: {fake.url} answered 500: {'c' * 300}"
    assert len(fake.bodies) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 307, 204])
def test_what_will_not_pass_is_not_tried_again(status: int) -> None:
    answer, fake = called((status, "" if status == 204 else "no", {"Location": "/elsewhere"}))
    assert f"answered {status}: " in answer
    assert len(fake.bodies) == 1


def test_an_answer_that_is_no_json_is_shown() -> None:
    answer, fake = called((200, "<html>welcome"))
    assert answer == f"error: {fake.url} answered what is not JSON: '<html>welcome'"


def test_an_answer_of_brackets_within_thousands_of_brackets_is_no_json() -> None:
    answer, fake = called((200, "[" * 5000))
    assert answer.startswith(f"error: {fake.url} answered what is not JSON: '[[[")


def answered(kind: str, parts: Iterable[bytes]) -> Any:
    """What a call gives (its error as text) where these parts are the answer, of that content type."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode())
            for part in parts:
                writer.write(part)
                await writer.drain()
        writer.close()

    async def go() -> Any:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            client = JsonClient(f"http://127.0.0.1:{port}", None, timeout_s=20.0, retries=0)
            try:
                return await client.post("x")
            except CallError as error:
                return str(error).partition(f":{port} ")[2]
            finally:
                await client.close()

    return asyncio.run(go())


@pytest.mark.parametrize("charset", ["hex", "idna", "undefined", "no-such"])
def test_json_is_read_whatever_character_set_is_claimed(charset: str) -> None:
    assert answered(f"application/json; charset={charset}", ['"é"'.encode()]) == "é"


def test_an_answer_without_an_end_is_given_up_before_it_fills_the_memory() -> None:
    assert answered("application/json", itertools.repeat(b" " * 2**20)) == "answered more than 64 MiB"


def test_a_hang_ends_at_the_deadline() -> None:
    answer, fake = called(HANG, timeout_s=0.05)
    assert answer == f"timeout: no answer from {fake.url} within 0.05 s"
    assert len(fake.bodies) == 1


def test_the_deadline_is_over_all_attempts_and_the_server_says_how_long_to_wait() -> None:
    answer, fake = called((429, "quota", {"Retry-After": "3600"}), timeout_s=0.3)
    assert answer.endswith(f"within 0.3 s; before that: error: {fake.url} answered 429: quota")
    assert len(fake.bodies) == 1


def test_nobody_there_is_named() -> None:
    async def go() -> None:
        async with FakeGrader() as fake:
            pass
        with pytest.raises(CallError, match=rf"error: no answer from {fake.url}: ClientConnectorError: Cannot connect"):
            await post(fake, retries=1)

    asyncio.run(go())


@pytest.mark.parametrize(
    "act", [(401, f"no such key: {KEY}"), (500, f"{KEY}!"), (200, f"{{{KEY}"), (200, f'["{KEY}"]')]
)
def test_a_server_that_repeats_the_key_does_not_give_it_away(act: Act) -> None:
    answer, fake = called(act, key=KEY, retries=0)
    assert KEY not in str(answer) and "[hidden]" in str(answer)
    assert fake.keys == [f"Bearer {KEY}"]
