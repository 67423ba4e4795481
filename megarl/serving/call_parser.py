"""Asks a server which functions a text calls: SGLang knows how each family of models writes that. No model works for it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from megarl.serving.answers import field
from megarl.serving.client import (
    ATTEMPTS,
    LONGEST_BACKOFF_S,
    ServerClient,
    ServerEndpoint,
    ServerError,
    ServerUnreachableError,
    nobody_there,
)

PARSE_S = 30.0
# SGLang 0.5.21 reads GLM-4.7's calls nowhere but in chats: elsewhere its parser of them ends on what this request's tools lack
# (function_call_parser.py: tool.function.strict). GLM-4.5 writes the same calls with a line break behind the name.
GLM47, GLM45, GLM47_NAME = "glm47", "glm45", re.compile(r"<tool_call>[^<\n]*(?=<)")
BROKEN = 500  # and above: a router that has no answer at the moment, and no server that knows no workers


@dataclass(frozen=True)
class ParsedCall:
    """name: of a function that there is. arguments: JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Parsed:
    """calls: in order. unread: whether there is a call, or the beginning of one, of which nothing could be made.

    text: what stands beside the calls.
    """

    calls: tuple[ParsedCall, ...]
    unread: bool
    text: str = ""


class CallParser:
    """SGLang's parser of that name, at whatever server answers.

    router: in front of the servers, which does not pass this on: it says who they are; or the only server.
    tools: JSON schemas, where all texts have the same. A router or a server that is gone for a moment is waited for, as a request
    waits (`ServerClient.generate`): backoff_s is its first pause.
    """

    def __init__(
        self, router: ServerEndpoint, parser: str, tools: Sequence[Mapping[str, Any]] = (), *, backoff_s: float = 0.5
    ) -> None:
        self._router, self._parser, self._tools = router, parser, [_told(tool) for tool in tools]
        self._backoff_s = backoff_s
        self._urls: list[str] = []
        self._finding = asyncio.Lock()
        self._clients: dict[str, ServerClient] = {}
        self._next = count()

    async def parse(self, text: str, tools: Sequence[Mapping[str, Any]] | None = None) -> Parsed:
        """The calls in a text. tools: of this one. Raises ServerUnreachableError, ServerError, AnswerError, DeadlineError."""
        parser = self._parser
        if parser == GLM47:
            parser, text = GLM45, GLM47_NAME.sub(r"\g<0>\n", text)
        told = self._tools if tools is None else [_told(tool) for tool in tools]
        body = {"text": text, "tools": told, "tool_call_parser": parser}
        for attempt in range(ATTEMPTS):
            urls: list[str] = []
            try:
                urls = await self._known()
                server = self._client(urls[next(self._next) % len(urls)])
                answer = await server.ask("/parse_function_call", body, PARSE_S)
            except (ServerUnreachableError, ServerError) as error:
                if attempt == ATTEMPTS - 1 or not nobody_there(error):
                    raise
                if self._urls is urls:
                    self._urls = []  # one has gone, and another may have come; the others' answers are still awaited
                if attempt or not urls:  # of several servers another may be asked at once
                    await asyncio.sleep(min(self._backoff_s * 2**attempt, LONGEST_BACKOFF_S))
                continue
            return _read(answer, text, f"{server.endpoint.name} ({server.endpoint.url}) /parse_function_call")
        raise AssertionError("the last attempt returns or raises")

    def _client(self, url: str) -> ServerClient:
        if url not in self._clients:
            self._clients[url] = ServerClient(ServerEndpoint(f"server at {url}", url, self._router.api_key))
        return self._clients[url]

    async def close(self) -> None:
        """Close the connections; the next text opens new ones."""
        clients, self._clients, self._urls = self._clients, {}, []
        for client in clients.values():
            await client.close()

    async def _known(self) -> list[str]:
        """Where all servers are: whoever asks first finds out, and the others wait for that."""
        async with self._finding:
            if not self._urls:
                self._urls = await self._find()
            return self._urls

    async def _find(self) -> list[str]:
        """Raises ServerUnreachableError where the router knows no server at the moment, and what asking it raises."""
        router = self._router
        async with ServerClient(router) as client:
            try:
                told = await client.ask("/workers", deadline_s=PARSE_S)
            except ServerError as error:
                if error.status >= BROKEN:
                    raise
                return [router.url]  # a server, which knows no workers
        workers = told.get("workers") if isinstance(told, dict) else None
        urls = [str(worker["url"]) for worker in workers or () if isinstance(worker, dict) and "url" in worker]
        if not urls:
            raise ServerUnreachableError(f"{router.name} ({router.url}) knows no server at the moment")
        return urls


def _told(tool: Mapping[str, Any]) -> dict[str, Any]:
    """What a parser looks at of a tool: a server refuses what else clients send, such as `"strict": null`."""
    function = tool["function"]
    told = {name: function[name] for name in ("name", "description", "parameters") if function.get(name) is not None}
    return {"type": "function", "function": told}


def _read(answer: Any, text: str, where: str) -> Parsed:
    calls = [
        ParsedCall(field(call, "name", str, where, "calls."), field(call, "parameters", str, where, "calls."))
        for call in field(answer, "calls", list, where)
    ]
    rest = field(answer, "normal_text", str, where)
    if not calls and _names_nothing(text):
        return Parsed((), unread=False, text=text)
    return Parsed(tuple(calls), unread=not calls and rest != text, text=rest)


def _names_nothing(text: str) -> bool:
    """Whether a text begins with a JSON object without a name, which is an answer.

    Llama's calls are objects without any mark, and SGLang takes whatever begins with a bracket for one.
    """
    try:
        found, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "name" not in found
