"""Tools: functions of the user's that the policy may call. Their JSON schemas come from their type hints.

Not for how a model writes a call (the server's parsers know, serving/call_parser.py), nor for whose turn it is (episode.py).
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import to_json

from megarl.agents.environment import Done, EnvironmentBrokenError, EnvironmentFailedError, Message, ToolResult, Turn
from megarl.agents.observations import as_parts, in_json, shown_text
from megarl.agents.patience import ENDS_ALL, NEVER_S, in_words, within
from megarl.core.errors import UserError
from megarl.core.importing import import_attribute
from megarl.core.words import with_article
from megarl.sandbox.python_tool import shortened

KEY = "agent.tools"
MOST_SHOWN = 300  # characters of an error that the model is told

T = TypeVar("T")
Content = (
    str | list[dict[str, Any]]
)  # what the policy is told: text, or parts of which some are images (observations.py)


@dataclass(frozen=True)
class ToolCall:
    """A function that the policy called. arguments: JSON.

    id: as the policy wrote it, as Kimi-K2 does; else nine letters and digits, as some templates want it.
    """

    name: str
    arguments: str
    id: str


@dataclass(frozen=True)
class Result:
    """What came of a call, as the message that the policy is told. cut: it is told the beginning and the end alone.

    worth: what a method of the environment gave; the message of one that ended the episode is told to nobody.
    """

    message: Message
    failed: bool
    cut: bool = False
    worth: ToolResult | Done | None = None


class Signature:
    """What a function is called with, by its type hints. method: its name in a class; its first parameter is the object.

    Raises UserError where it has parameters without type hints, or of types that JSON has no schema for.
    """

    def __init__(self, function: Callable[..., Any], where: str, *, method: str | None = None) -> None:
        self.name: str = function.__name__ if method is None else method
        self._parameters = _parameters(function, where, skip=0 if method is None else 1)
        try:
            schema = self._parameters.model_json_schema()
        except Exception as error:  # pydantic's, of several kinds
            raise UserError(f"{where}: {self.name} has a parameter that JSON has no schema for: {error}") from error
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": inspect.getdoc(function) or "",
                "parameters": {name: value for name, value in schema.items() if name != "title"},
            },
        }

    def read(self, arguments: str) -> dict[str, Any]:
        """Values by name, of the JSON of a call. Raises EnvironmentFailedError where it takes others."""
        try:
            given = self._parameters.model_validate_json(arguments or "{}")
        except ValidationError as error:
            said = "; ".join(
                f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg']}" for each in error.errors()
            )
            raise EnvironmentFailedError(f"wrong arguments: {said}") from error
        except Exception as error:  # of a user's validator
            raise EnvironmentFailedError(f"wrong arguments: {in_words(error)}") from error
        return {name: getattr(given, name) for name in type(given).model_fields}


class Tool:
    """A function with the schema of its parameters. timed: it ends in time by itself, and its wait for a place does not count.

    Raises UserError, as Signature does.
    """

    def __init__(self, function: Callable[..., Any], where: str = KEY, *, timed: bool = False) -> None:
        self._function, self._timed = function, timed
        self._signature = Signature(function, where)
        self.name, self.schema = self._signature.name, self._signature.schema

    async def call(self, arguments: str, seconds: float) -> Content:
        """What the function gives. Raises EnvironmentFailedError: it raised, did not end, or takes other arguments."""
        values = self._signature.read(arguments)
        return await within(
            lambda: apart(self._function, values, as_content), NEVER_S if self._timed else seconds, self.name
        )


class AnyTool(Protocol):
    """What a policy may call, wherever it runs."""

    name: str
    schema: dict[str, Any]

    async def call(self, arguments: str, seconds: float) -> Content | ToolResult | Done:
        """As of Tool; of an environment's with what it was worth. Raises EnvironmentBrokenError where that costs the episode."""


class OfEpisodes(Protocol):
    """Tools that are methods of each episode's environment."""

    schemas: list[dict[str, Any]]

    def of(self, environment: Any) -> Mapping[str, AnyTool]:
        """By name, for one turn of that environment's episode."""


class Holder(Protocol):
    """What tools hold, such as processes."""

    async def close(self) -> None:
        """End it; what still runs in it fails."""


class Toolbox:
    """The tools of a recipe. timeout_s: of one call. held: what is closed with it.

    max_calls: of one turn, that are run; None: all. most_characters: of one result; a longer one loses its middle; None: any.
    methods: of environments.
    """

    def __init__(
        self,
        tools: Sequence[AnyTool],
        timeout_s: float,
        held: Sequence[Holder] = (),
        *,
        max_calls: int | None = None,
        most_characters: int | None = None,
        methods: OfEpisodes | None = None,
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._timeout_s, self._held = timeout_s, held
        self._max_calls, self._most_characters, self._methods = max_calls, most_characters, methods
        self.schemas = [*(tool.schema for tool in tools), *([] if methods is None else methods.schemas)]
        self._names = ", ".join(schema["function"]["name"] for schema in self.schemas)

    async def call(self, calls: Sequence[ToolCall], environment: Any = None) -> list[Result]:
        """Run calls side by side; their results, in order. What goes wrong in one is what the policy is told of it.

        environment: the episode's, whose methods run one after another. Raises EnvironmentBrokenError.
        """
        tools = self._tools if self._methods is None else {**self._tools, **self._methods.of(environment)}
        most = len(calls) if self._max_calls is None else self._max_calls
        ran = await asyncio.gather(*(self._one(call, tools) for call in calls[:most]))
        why = f"this call was not run: at most {most} of one turn's calls are run. Call again in the next turn"
        return [*ran, *(self._failed(why, _about(call)) for call in calls[most:])]

    async def close(self) -> None:
        """Close what tools hold."""
        await asyncio.gather(*(each.close() for each in self._held))

    def unread(self, call_id: str) -> Result:
        """What the policy is told where it called something, but nobody can make out what. call_id: of the result."""
        why = f"this call cannot be read, or names no tool. Tools: {self._names}"
        return self._failed(why, {"tool_call_id": call_id})

    async def _one(self, call: ToolCall, tools: Mapping[str, AnyTool]) -> Result:
        about = _about(call)
        tool = tools.get(call.name)
        if tool is None:
            return self._failed(f"there is no tool {call.name!r}. Tools: {self._names}", about)
        try:
            given = await tool.call(call.arguments, self._timeout_s)
            if isinstance(given, str | list):
                return self._told(given, about)
            content = "" if isinstance(given, Done) else given.content
            return replace(self._told(content, about), worth=given)
        except EnvironmentBrokenError:
            raise
        except EnvironmentFailedError as error:
            return self._failed(str(error), about)

    def _failed(self, why: str, about: Mapping[str, str]) -> Result:
        return self._told(f"error: {why[:MOST_SHOWN]}", about, failed=True)

    def _told(self, content: Content, about: Mapping[str, str], *, failed: bool = False) -> Result:
        most, length = self._most_characters, len(shown_text(content, ""))
        cut = most is not None and length > most
        shown = content if most is None or not cut else _cut(content, most, length)
        return Result({"role": "tool", "content": shown, **about}, failed, cut)


def _cut(content: Content, most: int, length: int) -> Content:
    """With so many characters of text; of several texts each loses its share. Images stay. length: of its texts."""
    if isinstance(content, str):
        return shortened(content, most)
    texts = (part.get("text") for part in content)
    return [
        part if text is None else {**part, "text": shortened(text, most * len(text) // length)}
        for part, text in zip(content, texts, strict=True)
    ]


def _about(call: ToolCall) -> dict[str, str]:
    return {"name": call.name, "tool_call_id": call.id}


def open_tools(paths: Sequence[str]) -> list[Tool]:
    """The tools that a recipe names. Raises UserError: a path that leads nowhere, no function, no hints, or a name twice."""
    tools: dict[str, Tool] = {}
    for path in paths:
        where = f"{KEY}: {path!r}"
        function = import_attribute(path, KEY)
        if not inspect.isfunction(function):
            raise UserError(
                f"{where}: it is {with_article(type(function).__name__)}; wanted is a function with type hints."
            )
        tool = Tool(function, where)
        if tool.name in tools:
            raise UserError(
                f"{where}: there is another tool with the name {tool.name!r}, and calls go by name. Rename one."
            )
        tools[tool.name] = tool
    return list(tools.values())


def as_text(value: Any) -> str:
    """A tool's result as the model reads it: text as it is, all else as JSON, and what is none by `str`. Raises ValueError."""
    if isinstance(value, bytes):  # what a program printed need not be UTF-8
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else to_json(value, fallback=in_json).decode()


def as_content(value: Any) -> Content:
    """The same, but with the images in it. Raises ValueError."""
    parts = as_parts(value)
    return as_text(value) if parts is None else parts


async def apart(function: Callable[..., Any], values: Mapping[str, Any], read: Callable[[Any], T]) -> T:
    """What a function gives, by `read`; one that is no coroutine runs in a thread, and so does the reading of it.

    What a coroutine gives is read in one, too, if it is no text: an image of PIL takes a while to become a file.
    """
    if inspect.iscoroutinefunction(function):
        return await _read(await function(**values), read)

    def call() -> tuple[Any, bool]:
        given = function(**values)
        later = inspect.isawaitable(given)  # of a coroutine that a decorator has wrapped in a plain function
        return (given if later else read(given)), later

    given, later = await in_thread(call)
    return await _read(await given, read) if later else given


async def _read(given: Any, read: Callable[[Any], T]) -> T:
    found: T = read(given) if isinstance(given, str) else await in_thread(lambda: read(given))
    return found


def as_given(value: Any) -> Any:
    """What a method of an environment gave, with what the policy is told as content. Raises as `as_content`."""
    if isinstance(value, ToolResult):
        return replace(value, content=as_content(value.content))
    return value if isinstance(value, Done | Turn) else as_content(value)


async def in_thread(call: Callable[[], Any]) -> Any:
    """What a blocking function gives. One that never ends keeps its thread, which no pool waits for and no exit either."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()

    def tell(result: Any, error: BaseException | None) -> None:
        if ended.done():
            return  # nobody waits for it any more
        if error is not None:
            ended.set_exception(
                RuntimeError(f"it exits ({error})") if isinstance(error, (*ENDS_ALL, StopIteration)) else error
            )
        else:
            ended.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:  # told to who waits; a thread has nobody else to tell
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name="tool", daemon=True).start()
    return await ended


def _parameters(function: Callable[..., Any], where: str, skip: int) -> type[BaseModel]:
    """The function's parameters, but the first few, as a model. Raises UserError."""
    name = function.__name__
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # whatever a name that stands for no type raises
        raise UserError(
            f"{where}: the type hints of {name} cannot be read: {type(error).__name__}: {error}."
        ) from error
    fields: dict[str, Any] = {}
    for parameter in [*inspect.signature(function).parameters.values()][skip:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(
                f"{where}: {name} has the parameter `{parameter}`, which a call by names cannot fill. Name each parameter."
            )
        if parameter.name not in hints:
            raise UserError(
                f"{where}: parameter {parameter.name!r} of {name} has no type hint, and what the model is told of it is made "
                f"from that. Write `{parameter.name}: int`, or what else it is."
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    try:
        # Of no number all comparisons are false: `if amount > balance` lets it pass.
        config = ConfigDict(extra="forbid", allow_inf_nan=False)
        made: type[BaseModel] = create_model(name, __config__=config, **fields)
    except Exception as error:  # pydantic's, of several kinds
        raise UserError(f"{where}: {name} has a parameter of a type that nothing can be read as: {error}") from error
    return made
