"""Requests that wait for their turn, are cut off, or are asked in vain."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import pytest

from megarl.rollout.asking import MOST_CUTS, Asker, Request, RequestFailedError
from megarl.rollout.gate import Gate
from megarl.serving.answers import Generation
from megarl.serving.client import ServerClient
from megarl.serving.sampling import Sampling
from tests.support.fake_sglang import END, FakeSglang, generation
from tests.support.sampled import no_text

T = TypeVar("T")
PROMPT = np.array([7, 8, 9], np.int32)


def conversation(fake: FakeSglang, call: Callable[[Asker, Gate, ServerClient], Awaitable[T]]) -> T:
    async def go() -> T:
        async with fake, ServerClient(fake.endpoint, attempts=3, backoff_s=0.001) as client:
            gate = Gate(2, 1)
            asker = Asker(client, gate, lambda ids: " ".join(map(str, ids)), deadline_s=5.0)
            return await asyncio.wait_for(call(asker, gate, client), 10)

    return asyncio.run(go())


@pytest.mark.parametrize("kind", ["refuses", "drops"])
def test_without_a_server_a_request_that_is_not_wanted_now_goes_on_later(kind: str) -> None:
    """A pause must neither wait for a server that is started again, nor lose the sample."""
    fake = FakeSglang()
    if kind == "refuses":
        fake.refuse["/generate"] = (503, "no workers are available")
    else:
        fake.drop_next = 99

    async def call(_: Asker, __: Gate, client: ServerClient) -> tuple[Generation | None, Generation | None]:
        request = Request(PROMPT, Sampling(3))
        first = await request.go_on(client, no_text, deadline_s=60.0, expects_cuts=lambda: True)
        fake.refuse.clear()
        fake.drop_next = 0
        return first, await request.go_on(client, no_text, deadline_s=60.0)

    first, then = conversation(fake, call)
    assert first is None and then is not None and then.finish == "stop"


def test_what_is_cut_off_while_the_gate_is_closed_goes_on_once_it_is_open() -> None:
    fake = FakeSglang(answer=lambda _: generation([5, 6, 7], finish="abort"))

    async def call(asker: Asker, gate: Gate, _: ServerClient) -> tuple[Generation, list[dict[str, Any]]]:
        fake.gate = asyncio.Event()
        asking = asyncio.create_task(asker.ask(Request(PROMPT, Sampling(8))))
        while not fake.in_flight:
            await asyncio.sleep(0)
        gate.close()
        fake.gate.set()
        await gate.idle()
        fake.answer = lambda _: generation([8, END])
        assert not asking.done()
        gate.open()
        return await asking, fake.bodies("/generate")

    answer, bodies = conversation(fake, call)
    # The last token of what was cut off was not looked at: it is drawn anew.
    assert [body["input_ids"] for body in bodies] == [[7, 8, 9], [7, 8, 9, 5, 6]]
    assert answer.token_ids.tolist() == [5, 6, 8, END]


def test_a_server_that_always_cuts_off_is_not_asked_for_ever() -> None:
    fake = FakeSglang(answer=lambda _: generation([5], finish="abort"))

    async def call(asker: Asker, gate: Gate, _: ServerClient) -> tuple[int, int]:
        with pytest.raises(RequestFailedError, match="aborted it, again and again"):
            await asker.ask(Request(PROMPT, Sampling(8)))
        return len(fake.bodies("/generate")), gate.running

    assert conversation(fake, call) == (MOST_CUTS + 1, 0)


def test_a_request_that_is_cancelled_leaves_the_gate() -> None:
    fake = FakeSglang()

    async def call(asker: Asker, gate: Gate, _: ServerClient) -> int:
        fake.gate = asyncio.Event()
        asking = asyncio.create_task(asker.ask(Request(PROMPT, Sampling(8))))
        while not fake.in_flight:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        fake.gate.set()
        return gate.running

    assert conversation(fake, call) == 0
