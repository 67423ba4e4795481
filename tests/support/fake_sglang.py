"""A fake SGLang server: the HTTP interface that the client uses, with scripted failures. Generates nothing real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from megarl.serving.client import ServerEndpoint

END = 2  # the end token: every completed response ends with it
KEY = "secret-of-the-test"

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def generation(token_ids: list[int], *, finish: str = "stop", version: int = 0, text: str = "") -> dict[str, Any]:
    """An answer of /generate, in SGLang's shape; log-probs are -1, -2, ..."""
    return {
        "text": text,
        "output_ids": token_ids,
        "meta_info": {
            "id": "x",
            "finish_reason": {"type": finish},
            "completion_tokens": len(token_ids),
            "cached_tokens": 1,
            "weight_version": str(version),
            "weight_versions": [{"version": str(version), "start": 0, "end": len(token_ids)}],
            "output_token_logprobs": [[-float(i + 1), token, None] for i, token in enumerate(token_ids)],
        },
    }


class FakeSglang:
    """`async with FakeSglang() as fake`: serves on a free port of loopback.

    answer: makes the answer of /generate from its request. drop_next: so many requests get their connection closed.
    refuse: path -> (status, text) answered instead. hang: paths that never answer. gate: where set, /generate waits for it.
    """

    def __init__(self, name: str = "server 0", answer: Answer | None = None) -> None:
        self.name = name
        self.answer = answer or (lambda body: generation([5, 6, END], text="42"))
        self.drop_next = 0
        self.refuse: dict[str, tuple[int, str]] = {}
        self.hang: set[str] = set()
        self.gate: asyncio.Event | None = None
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str | None] = []
        self.in_flight = self.most_in_flight = 0
        application = web.Application(client_max_size=2**26)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._server = TestServer(application)
        self._forever = asyncio.Event()

    async def __aenter__(self) -> FakeSglang:
        await self._server.start_server()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forever.set()
        await self._server.close()

    @property
    def endpoint(self) -> ServerEndpoint:
        """Where it answers."""
        return ServerEndpoint(self.name, str(self._server.make_url("")).rstrip("/"), KEY)

    def bodies(self, path: str) -> list[dict[str, Any]]:
        """What was posted to a path."""
        return [body for called, body in self.calls if called == path]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        self.calls.append((request.path, body))
        self.keys.append(request.headers.get("Authorization"))
        if self.drop_next > 0:
            self.drop_next -= 1
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if request.path in self.hang:
            await self._forever.wait()
        if request.path in self.refuse:
            status, text = self.refuse[request.path]
            return web.Response(status=status, text=text)
        return await self.respond(request.path, body)

    async def respond(self, path: str, body: dict[str, Any]) -> web.Response:
        """What a well server says; subclasses add paths."""
        if path == "/generate":
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            try:
                if self.gate is not None:
                    await self.gate.wait()
                await asyncio.sleep(0)
                made = self.answer(body)
                if isinstance(meta := made.get("meta_info"), dict):
                    meta.setdefault("prompt_tokens", len(body["input_ids"]))
                return web.json_response(made)
            finally:
                self.in_flight -= 1
        if path == "/model_info":
            return web.json_response({"weight_version": "3"})
        return web.json_response({"success": True, "message": "Success"})
