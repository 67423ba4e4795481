"""Tools of an MCP server, which is a command of its own or behind an address: connected, called, and connected anew.

Not for what becomes of a call that fails (tools.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import shlex
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.agents.environment import EnvironmentFailedError
from megarl.agents.observations import IMAGE, TEXT, as_parts
from megarl.agents.patience import within
from megarl.agents.tools import Content
from megarl.core.errors import UserError
from megarl.core.log import get_logger
from megarl.core.ray_env import without_ray
from megarl.data.calls import parse_arguments

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult

log = get_logger(__name__)

KEY = "agent.mcp"
CONNECT_S = 60.0  # a command loads its packages first, and a busy node may take long for that
LOOK_S = 10.0  # until a server that left a call unanswered has to say which tools it has
NO_MORE = ("Connection closed", "Session terminated")  # what the client says of a connection that is no more
CLOSE_S = 10.0  # one that is told to end is killed by the client within a few seconds


class McpServer:
    """One server, as this process talks to it. where: a command, or an address that begins with http.

    The client belongs to a task of its own, which opens and closes it.
    """

    def __init__(self, where: str, look_s: float = LOOK_S) -> None:
        self.where, self._look_s = where, look_s
        self._look: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._connection: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Client] | None = None  # of a connection that is being made, or is there
        self._leave = asyncio.Event()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Content:
        """What a tool gives. Raises EnvironmentFailedError where the server says that it failed.

        A server that ended is started, or looked for, anew by the next call; this one has failed. So is one that hangs: after a
        call that was given up, or answered with what is no answer, it is asked for its tools. One that starts for longer than a
        call may take goes on starting for the next.
        """
        ready = await self._connection_made()
        client = await asyncio.shield(ready)
        try:
            result = await client.call_tool(name, dict(arguments))
        except asyncio.CancelledError:
            self._look_later(ready, client)
            raise
        except Exception as error:
            if _gone(error):
                self._left(ready, f"is gone ({error})")
            elif _unclear(error):
                self._look_later(ready, client)
            raise
        if result.is_error:
            raise EnvironmentFailedError(_text(result))
        return _content(result)

    async def tools(self) -> list[dict[str, Any]]:
        """The schemas of its tools, as chat templates want them."""
        client, schemas, cursor = await (await self._connection_made()), [], None
        while True:
            listed = await client.list_tools(cursor=cursor)
            schemas += [_schema(tool.name, tool.description or "", tool.input_schema) for tool in listed.tools]
            cursor = listed.next_cursor
            if cursor is None:
                return schemas

    def _look_later(self, ready: asyncio.Future[Client], client: Client) -> None:
        if ready is self._ready and (self._look is None or self._look.done()):
            self._look = asyncio.create_task(self._look_at(ready, client))

    async def _look_at(self, ready: asyncio.Future[Client], client: Client) -> None:
        """Leave a server that answers nothing any more; one that is at a long call answers others."""
        try:
            await asyncio.wait_for(client.list_tools(), self._look_s)
        except TimeoutError:
            self._left(ready, f"has not answered for {self._look_s:g} s")
        except Exception as error:
            if _gone(error) or _unclear(error):
                self._left(ready, f"is gone ({error})")

    def _left(self, ready: asyncio.Future[Client], why: str) -> None:
        if ready is self._ready:
            log.warning("the MCP server %r %s; the next call connects anew", self.where, why)
            self._leave.set()
            self._ready = None

    async def close(self) -> None:
        """End the connection, and with it a server that is a command."""
        if self._look is not None:
            self._look.cancel()
        self._ready = None
        self._leave.set()
        if self._connection is not None:
            await asyncio.wait({self._connection}, timeout=CLOSE_S)
            self._connection.cancel()

    async def _connection_made(self) -> asyncio.Future[Client]:
        """The connection that there is, or is being made; another where that failed."""
        async with self._opening:
            ready = self._ready
            if ready is None or (ready.done() and ready.exception() is not None):
                await self.close()
                self._leave = asyncio.Event()
                ready = self._ready = asyncio.get_running_loop().create_future()
                self._connection = asyncio.create_task(self._hold(ready, self._leave))
            return ready

    async def _hold(self, ready: asyncio.Future[Client], leave: asyncio.Event) -> None:
        """Be connected until told to leave."""
        from mcp import Client

        try:
            async with contextlib.AsyncExitStack() as stack:
                async with _answers(self.where):
                    client = await stack.enter_async_context(Client(_target(self.where), cache=None))
                if not ready.done():
                    ready.set_result(client)
                await leave.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(_not_there(self.where, error))
            elif not leave.is_set():
                log.warning("the MCP server %r ended: %s", self.where, _why(error))


class McpTool:
    """One tool of a server."""

    def __init__(self, server: McpServer, schema: dict[str, Any]) -> None:
        self._server = server
        self.schema = schema
        self.name: str = schema["function"]["name"]

    async def call(self, arguments: str, seconds: float) -> Content:
        """As of Tool. The server checks the arguments."""
        try:
            given = parse_arguments(arguments)  # without half characters: a server's connection does not outlive one
        except ValueError as error:
            raise EnvironmentFailedError(f"wrong arguments: {error}") from error
        return await within(lambda: self._server.call(self.name, given), seconds, self.name)


def open_servers(places: Sequence[str]) -> list[tuple[McpServer, list[McpTool]]]:
    """The servers that a recipe names, with their tools. Each is asked for its list, by a connection that ends with it.

    Raises UserError where one is not there, or has none.
    """
    found: list[tuple[McpServer, list[McpTool]]] = []
    for where in places:
        schemas = _listed(where)
        if not schemas:
            raise UserError(f"{KEY}: the MCP server {where!r} has no tools.")
        server = McpServer(where)
        found.append((server, [McpTool(server, schema) for schema in schemas]))
    return found


def _listed(where: str) -> list[dict[str, Any]]:
    """A server's schemas, from a thread: whoever asks may have an event loop that runs. Raises UserError."""
    found: list[dict[str, Any]] = []
    failures: list[BaseException] = []

    async def once() -> None:
        server = McpServer(where)
        try:
            async with _answers(where):
                found.extend(await server.tools())
        finally:
            await server.close()

    def run() -> None:
        try:
            importlib.import_module("mcp")  # takes seconds of a core, which are not the server's
            asyncio.run(once())
        except BaseException as error:  # told to who waits
            failures.append(error)

    thread = threading.Thread(target=run, name="mcp", daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise UserError(
            f"{KEY}: {_why(failures[0])}. Wanted is a command that speaks MCP on its standard input and output, such as "
            "`python tools_server.py`, or the address of one that is there, such as http://127.0.0.1:8000/mcp."
        ) from failures[0]
    return found


@contextlib.asynccontextmanager
async def _answers(where: str) -> AsyncIterator[None]:
    """What a server is asked within here it has CONNECT_S for. Raises EnvironmentFailedError."""
    try:
        async with asyncio.timeout(CONNECT_S) as deadline:
            yield
    except TimeoutError as error:
        raise _not_there(where, f"it has not answered for {CONNECT_S:g} s" if deadline.expired() else error) from error


def _not_there(where: str, why: str | Exception) -> EnvironmentFailedError:
    if isinstance(why, EnvironmentFailedError):
        return why
    return EnvironmentFailedError(
        f"the MCP server {where!r} is not there: {why if isinstance(why, str) else _why(why)}"
    )


def _target(where: str) -> Any:
    from mcp import StdioServerParameters

    if where.startswith(("http://", "https://")):
        return where
    program, *arguments = shlex.split(where)
    # All of it, so that what belongs to this run is known by its mark.
    return StdioServerParameters(command=program, args=arguments, env=without_ray())


def _gone(error: Exception) -> bool:
    """Whether there is no connection any more; other errors are the server's answers, or of what it answered."""
    from mcp import MCPError

    if isinstance(error, MCPError):
        return any(said in str(error) for said in NO_MORE)
    return not _unclear(error)


def _unclear(error: Exception) -> bool:
    """Whether it says nothing of the server, which may go on: calls of others are there.

    So where the client refused an answer, such as one that is not of the tool's own schema; a client that is closed raises the
    same. And the code of a connection that is no more is JSON-RPC's own for whatever a server has no other code for.
    """
    from mcp import MCPError
    from mcp_types import CONNECTION_CLOSED

    if isinstance(error, MCPError):
        return bool(error.code == CONNECTION_CLOSED)
    return isinstance(error, RuntimeError | ValueError)


def _schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    shown = {key: value for key, value in parameters.items() if key not in ("title", "$schema")}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": shown}}


def _content(result: CallToolResult) -> Content:
    """What the policy is told: as of `_text`, but with the images of a result that has some. Raises ValueError."""
    from mcp_types import ImageContent

    if not any(isinstance(block, ImageContent) for block in result.content):
        return _text(result)
    parts: list[dict[str, Any]] = []
    for number, block in enumerate(result.content):
        parts += [{"type": TEXT, "text": "\n"}] if number else []
        if isinstance(block, ImageContent):
            parts.append({"type": IMAGE, "image": f"data:{block.mime_type};base64,{block.data}"})
        else:
            parts.append({"type": TEXT, "text": _shown(block)})
    found = as_parts(parts)
    assert found is not None
    return found


def _text(result: CallToolResult) -> str:
    """What a model reads of a result: its texts, and of all else what it is."""
    parts = [_shown(block) for block in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content)
    return "\n".join(parts)


def _shown(block: Any) -> str:
    """A block's text, or that of the resource in it; of others their kind."""
    for found in (block, getattr(block, "resource", None)):
        if isinstance(text := getattr(found, "text", None), str):
            return text
    return f"[{block.type}]"


def _why(error: BaseException) -> str:
    """The first cause: clients of MCP raise groups of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, EnvironmentFailedError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
