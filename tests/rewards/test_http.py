from __future__ import annotations

import asyncio
import contextlib
import datetime
import itertools
import math
import re
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import numpy as np
import pytest

from megarl.core.ports import free_port
from megarl.rewards import patience
from megarl.rewards.http import CallError, JsonClient, LateError
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
    answer, fake = called(HANG, timeout_s=1.0)
    assert answer == f"timeout: no answer from {fake.url} within 1 s"
    assert len(fake.bodies) == 1


def test_a_rate_limit_is_waited_for_as_the_server_says_within_the_time_for_outages() -> None:
    began = time.monotonic()
    answer, fake = called((429, "quota", {"Retry-After": "1"}), retries=0, retry_for_s=30.0)
    assert answer == {"echo": {"body": "x"}} and time.monotonic() - began >= 1
    answer, fake = called(
        *[(429, "quota", {"Retry-After": "3600"})] * 2, retries=0, retry_for_s=0.2, section="reward.graders.tests"
    )
    assert re.fullmatch(
        rf"error: {fake.url} answered 429: quota; it has been gone or busy for \d+ s, and is asked again for 0\.2 s "
        r"\(reward\.graders\.tests\.retry_for_s\)",
        answer,
    )
    assert len(fake.bodies) == 2


@pytest.mark.parametrize("act", [(429, ""), (502, ""), (503, "loading"), (504, ""), DROP])
def test_a_server_that_is_gone_or_busy_is_asked_again_however_few_retries(act: Act) -> None:
    assert called(*[act] * 5, retries=0, retry_for_s=30.0)[0] == {"echo": {"body": "x"}}


@pytest.mark.parametrize(("status", "asked"), [(400, 1), (422, 1), (500, 3), (501, 3)])
def test_an_answer_that_is_wrong_by_itself_is_not_an_outage(status: int, asked: int) -> None:
    answer, fake = called(*[(status, "no")] * 9, retries=2, retry_for_s=30.0)
    assert answer == f"error: {fake.url} answered {status}: no" and len(fake.bodies) == asked


@pytest.mark.parametrize(("known", "asked"), [(False, 2), (True, 10)])
def test_whether_a_server_is_there_is_waited_for_where_it_was_known(known: bool, asked: int) -> None:
    async def go() -> tuple[str, int]:
        async with FakeGrader(*[(503, "loading")] * 9) as fake:
            client = JsonClient(
                fake.url, None, timeout_s=9.0, retries=1, retry_for_s=30.0, known=known, backoff_s=0.001
            )
            try:
                said = str(await client.post("x", probes=True))
            except CallError as error:
                said = str(error)
            await client.close()
            return said.replace(fake.url, "it"), len(fake.bodies)

    assert asyncio.run(go()) == ("{'echo': 'x'}" if known else "error: it answered 503: loading", asked)


@contextlib.asynccontextmanager
async def served(port: int, answer: bytes | None = b'"well"') -> AsyncIterator[None]:
    """A server at that port, and at its end its connections closed. answer: of each request; None: it says nothing."""
    open_now: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_now.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                if answer is not None:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer))
                await reader.readexactly(3)

    server = await asyncio.start_server(serve, "127.0.0.1", port, reuse_address=True)
    try:
        yield
    finally:
        server.close()
        for writer in open_now:
            writer.close()


def test_a_server_that_is_started_again_is_waited_for_and_people_are_told_until_when(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patience, "SILENT_S", 0.05)

    async def go() -> tuple[list[str], list[Any], list[float], str]:
        told: list[str] = []
        url = f"http://127.0.0.1:{(port := free_port())}"
        client = JsonClient(
            url, None, timeout_s=9.0, retries=0, retry_for_s=60.0, section="judge", tell=told.append, backoff_s=0.02
        )
        well = [client.well_since]
        async with served(port):
            found = [await client.post("x")]
        asked = [asyncio.create_task(client.post("x")) for _ in range(20)]
        async with asyncio.timeout(60):
            while not told:
                await asyncio.sleep(0.01)
        well.append(client.well_since)
        async with served(port):
            found += await asyncio.gather(*asked)
        well.append(client.well_since - time.monotonic())
        await client.close()
        return told, found, well, url

    told, found, [before, during, after], url = asyncio.run(go())
    assert found == ["well"] * 21
    assert len(told) == 2, told  # once for all that wait
    assert re.fullmatch(
        rf"error: no answer from {url}: .*\. It is asked again until \d\d:\d\d:\d\d \(judge\.retry_for_s: 60 s\)",
        told[0],
    )
    assert re.fullmatch(rf"{url} answers again, after \d+ s", told[1])
    assert before == -math.inf and during == math.inf and -60 < after <= 0


def test_an_outage_ends_for_all_at_once_and_later_requests_do_not_wait_for_it_again() -> None:
    async def go() -> tuple[list[Any], float]:
        client = JsonClient(
            f"http://127.0.0.1:{free_port()}", None, timeout_s=9.0, retries=0, retry_for_s=2.0, backoff_s=0.02
        )
        failed = await asyncio.gather(*(client.post("x") for _ in range(3)), return_exceptions=True)
        began = time.monotonic()
        failed += await asyncio.gather(client.post("x"), return_exceptions=True)
        took_s = time.monotonic() - began
        await client.close()
        return failed, took_s

    failed, took_s = asyncio.run(go())
    assert {type(each) for each in failed} == {LateError}  # so that those who wait behind them are given up
    assert took_s < 2


def test_what_a_server_had_taken_before_it_was_gone_is_asked_again() -> None:
    """A machine that dies resets no connection: its requests are late, and others find nobody there."""

    async def go() -> list[Any]:
        client = JsonClient(
            f"http://127.0.0.1:{(port := free_port())}",
            None,
            timeout_s=0.5,
            retries=0,
            retry_for_s=60.0,
            backoff_s=0.02,
        )
        async with served(port, answer=None):
            asked = [asyncio.create_task(client.post("x"))]
            await asyncio.sleep(0.2)
            client._outage.left_s(time.monotonic())  # as of another request that found nobody there
            await asyncio.sleep(0.4)
        async with served(port):
            found = await asyncio.gather(*asked)
        await client.close()
        return found

    assert asyncio.run(go()) == ["well"]


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
