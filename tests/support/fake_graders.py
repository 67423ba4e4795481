"""A fake reward server and a fake judge: the protocols of docs/rewards.md on loopback, with scripted failures."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from aiohttp.test_utils import TestServer

HANG = "hang"  # never answers
DROP = "drop"  # closes the connection without an answer
# What a server does with a request: HANG, DROP, an answer's status and text (and headers), None for its own answer, or a
# barrier that it waits at before its own answer.
Act = str | tuple[int, str] | tuple[int, str, dict[str, str]] | asyncio.Barrier | None


class FakeGrader:
    """`async with` one: serves on a free port of loopback.

    script: what is done with the first requests, one each; those after them are answered. wait_for: requests wait until
    so many are in flight. url: where it answers, once it serves. bodies, keys, paths: of every request, in the order of arrival.
    """

    def __init__(self, *script: Act, wait_for: int = 1) -> None:
        self.script = deque(script)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        self.in_flight = self.most_in_flight = 0
        self.url = ""
        self._wait_for = wait_for
        self._enough = asyncio.Event()
        self._never = asyncio.Event()
        application = web.Application(client_max_size=2**26)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._server = TestServer(application)

    async def __aenter__(self) -> Self:
        await self._server.start_server()
        self.url = str(self._server.make_url("/v1"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._never.set()
        self._enough.set()
        await self._server.close()

    def respond(self, body: dict[str, Any]) -> Any:
        """What a well server says; subclasses have their protocol."""
        return {"echo": body}

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.paths.append(request.path)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if self.in_flight >= self._wait_for:
                self._enough.set()
            await self._enough.wait()
            act = self.script.popleft() if self.script else None
            if isinstance(act, asyncio.Barrier):
                await act.wait()
            if act == HANG:
                await self._never.wait()
            if act in (HANG, DROP):
                assert request.transport is not None
                request.transport.close()
                return web.Response()
            if isinstance(act, tuple):
                headers = act[2] if len(act) == 3 else {}
                return web.Response(status=act[0], text=act[1], headers=headers)
            return web.json_response(self.respond(body))
        finally:
            self.in_flight -= 1


class FakeRemote(FakeGrader):
    """A reward server: `score` of each item."""

    def __init__(self, *script: Act, score: Callable[[dict[str, Any]], Any] = lambda _: 1.0, wait_for: int = 1) -> None:
        super().__init__(*script, wait_for=wait_for)
        self.score = score

    def respond(self, body: dict[str, Any]) -> Any:
        """Rewards."""
        return {"rewards": [self.score(item) for item in body["items"]]}


class FakeJudge(FakeGrader):
    """A judge: `reply` to each question, in the shape of an OpenAI-compatible server."""

    def __init__(self, *script: Act, reply: Callable[[str], Any] = lambda _: "Score: 10", wait_for: int = 1) -> None:
        super().__init__(*script, wait_for=wait_for)
        self.reply = reply

    def respond(self, body: dict[str, Any]) -> Any:
        """A completion."""
        content = self.reply(body["messages"][-1]["content"])
        return {"choices": [{"index": 0, "message": {"role": "assistant", "content": content}}]}


class FakeClassifier(FakeGrader):
    """A reward model of an SGLang server: `scores` of each conversation's tokens."""

    def __init__(
        self, *script: Act, scores: Callable[[list[int]], list[float]] = lambda _: [1.0], wait_for: int = 1
    ) -> None:
        super().__init__(*script, wait_for=wait_for)
        self.scores = scores

    def respond(self, body: dict[str, Any]) -> Any:
        """What SGLang calls an embedding."""
        ids = body["input_ids"]
        return {"embedding": self.scores(ids), "meta_info": {"prompt_tokens": len(ids)}}


@contextmanager
def in_thread(*fakes: FakeGrader) -> Iterator[None]:
    """Serve from an event loop of another thread, for tests that wait for other processes."""
    with ThreadPoolExecutor(1) as threads:
        loop = asyncio.new_event_loop()
        stack = AsyncExitStack()

        async def enter() -> None:
            for fake in fakes:
                await stack.enter_async_context(fake)

        threads.submit(loop.run_until_complete, enter()).result(30)
        serving = threads.submit(loop.run_forever)
        try:
            yield
        finally:
            loop.call_soon_threadsafe(loop.stop)
            serving.result(30)
            threads.submit(loop.run_until_complete, stack.aclose()).result(30)
            threads.submit(loop.close).result(30)
