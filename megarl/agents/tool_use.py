"""A turn of the policy's with calls of tools: what a server's parser makes of it, and what the tools give."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megarl.agents.tool_sources import SharedTools, open_toolbox
from megarl.agents.tools import Result, Toolbox, ToolCall
from megarl.core.errors import DeadlineError
from megarl.core.log import get_logger
from megarl.recipe.agent import Agent
from megarl.rollout.asking import RequestFailedError
from megarl.serving.answers import AnswerError
from megarl.serving.call_parser import CallParser, Parsed
from megarl.serving.client import ServerEndpoint, ServerError, ServerUnreachableError

log = get_logger(__name__)

# What a server answers where its parser raises: what the policy wrote is no call that it knows.
READER_FAILED = (400, 500)
# Kimi-K2 gives each call an id as it writes it, `functions.NAME:NUMBER`, and its template heads the result with it.
_WRITTEN_ID = re.compile(r"<\|tool_call_begin\|>\s*([^\s<|]+)\s*<\|tool_call_argument_begin\|>")


class Parser(Protocol):
    """Reads calls out of a text."""

    async def parse(self, text: str, tools: Sequence[Mapping[str, Any]] | None = None) -> Parsed:
        """As of CallParser."""

    async def close(self) -> None:
        """As of CallParser."""


async def read_calls(parser: Parser, text: str, tools: Sequence[Mapping[str, Any]] | None = None) -> Parsed:
    """The calls in a text, with its special tokens. Raises RequestFailedError where no server reads it."""
    try:
        return await parser.parse(text, tools)
    except ServerError as error:
        if error.status not in READER_FAILED:
            raise RequestFailedError(f"no server read the calls of tools: {error}") from error
        log.warning("a call of tools cannot be read: %s", error)
        return Parsed((), unread=True)
    except (ServerUnreachableError, AnswerError, DeadlineError) as error:
        raise RequestFailedError(f"no server read the calls of tools: {error}") from error


def named(parsed: Parsed, turn: int, text: str) -> tuple[ToolCall, ...]:
    """Calls of a turn, with their ids: those that the model wrote in the text, where it names its calls itself."""
    ids = _WRITTEN_ID.findall(text)
    if len(ids) != len(parsed.calls) or len({*ids}) < len(ids):
        ids = [_id(turn, number) for number in range(len(parsed.calls))]
    return tuple(ToolCall(call.name, call.arguments, each) for call, each in zip(parsed.calls, ids, strict=True))


def _id(turn: int, number: int) -> str:
    return f"c{turn % 10**4:04d}{number % 10**4:04d}"


@dataclass(frozen=True)
class Used:
    """calls: that could be read, or one in the place of that which could not. results: of each."""

    calls: tuple[ToolCall, ...]
    results: Sequence[Result]


class ToolUse:
    """A recipe's tools, and who reads the model's calls."""

    def __init__(self, toolbox: Toolbox, parser: Parser) -> None:
        self._toolbox, self._parser = toolbox, parser
        self.schemas: list[dict[str, Any]] = toolbox.schemas

    @classmethod
    def open(cls, agent: Agent, router: ServerEndpoint, shared: SharedTools | None = None) -> ToolUse:
        """Of a recipe that names tools. shared, and raises UserError: as of `open_toolbox`."""
        assert agent.tool_parser is not None
        toolbox = open_toolbox(agent, shared)
        return cls(toolbox, CallParser(router, agent.tool_parser, toolbox.schemas))

    async def use(self, text: str, turn: int, environment: Any = None) -> Used | None:
        """Call what the policy called, side by side; None where it called nothing. text: with its special tokens.

        environment: the episode's, some of whose methods may be tools. Raises RequestFailedError where no server reads the text,
        and EnvironmentBrokenError.
        """
        parsed = await read_calls(self._parser, text)
        if parsed.unread:
            # Templates may want a call before each result, with its id; nothing else of it is seen.
            call = ToolCall(self.schemas[0]["function"]["name"], "{}", _id(turn, 0))
            return Used((call,), [self._toolbox.unread(call.id)])
        if not parsed.calls:
            return None
        calls = named(parsed, turn, text)
        return Used(calls, await self._toolbox.call(calls, environment))

    async def close(self) -> None:
        """Close the parser's connections, and what tools hold."""
        await asyncio.gather(self._parser.close(), self._toolbox.close())
