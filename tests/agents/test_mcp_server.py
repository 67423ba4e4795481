"""Tools of MCP servers: real ones, as commands and behind an address, whatever becomes of them."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.agents import mcp_server
from megarl.agents.environment import EnvironmentFailedError
from megarl.agents.mcp_server import McpServer
from megarl.agents.patience import within
from megarl.agents.tool_sources import open_toolbox
from megarl.agents.tools import Result, Toolbox, ToolCall
from megarl.core.errors import UserError
from megarl.core.ports import free_port
from megarl.recipe.agent import Agent
from tests.support.processes import ended

SHOP = Path(__file__).parent / "mcp_shop.py"
PLAIN = Path(__file__).parent / "mcp_plain.py"


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    return tmp_path / "pids"


def opened(*places: str, tools: tuple[str, ...] = (), timeout_s: float = 60.0) -> Toolbox:
    return open_toolbox(Agent(tools=tools, mcp=places, tool_parser="qwen25", tool_timeout_s=timeout_s))  # type: ignore[arg-type]


def by_command(pids: Path, program: Path = PLAIN) -> str:
    """What becomes of processes is seen of those that start at once."""
    return f"{sys.executable} {program} {pids}"


async def call(toolbox: Toolbox, *calls: tuple[str, Any]) -> list[Result]:
    asked = [ToolCall(name, json.dumps(given), f"c{number}") for number, (name, given) in enumerate(calls)]
    return await toolbox.call(asked)


def started(pids: Path) -> list[int]:
    return [int(line) for line in pids.read_text().split()]


def test_the_tools_of_a_command_are_called_side_by_side(pids: Path) -> None:
    async def go() -> list[Result]:
        toolbox = opened(by_command(pids, SHOP), tools=("tests.agents.toolkit:multiply",))
        names = [schema["function"]["name"] for schema in toolbox.schemas]
        assert names == ["multiply", "price_of", "close_down", "wait", "leaflet"]
        assert toolbox.schemas[1]["function"] == {
            "name": "price_of",
            "description": "What so many pieces of a fruit cost.",
            "parameters": {
                "type": "object",
                "properties": {
                    "fruit": {"title": "Fruit", "type": "string"},
                    "count": {"title": "Count", "type": "integer", "default": 1},
                },
                "required": ["fruit"],
            },
        }
        try:
            return await call(
                toolbox,
                ("price_of", {"fruit": "apple", "count": 2}),
                ("multiply", {"left": 3}),
                ("price_of", {"fruit": "kiwi"}),
                ("price_of", {"fruit": "pear"}),
                ("price_of", {"count": 1}),
                ("price_of", [1]),
                ("leaflet", {"fruit": "apple"}),
                ("leaflet", {"fruit": "kiwi"}),
                ("leaflet", {"fruit": "plum"}),
            )
        finally:
            await toolbox.close()

    apple, product, kiwi, pear, without, no_object, leaflet, nothing, plum = asyncio.run(go())
    assert [each.message["content"] for each in (leaflet, nothing)] == ["apples are fresh", ""]
    assert plum.message["content"] == [
        {"type": "text", "text": "a plum:"},
        {"type": "text", "text": "\n"},
        {"type": "image", "image": b"of a plum"},
    ]
    assert [each.message["content"] for each in (apple, product, pear)] == ["6.0", "6", "2.5"]
    assert not any(each.failed for each in (apple, product, pear))
    assert kiwi.failed and kiwi.message["content"].startswith("error: Error executing tool price_of")
    assert without.failed and "fruit" in without.message["content"]
    assert no_object.failed and no_object.message["content"].startswith("error: wrong arguments: they are ")
    listed, used = started(pids)
    assert ended([listed, used])


def test_one_that_ends_fails_its_call_and_is_there_again_for_the_next(pids: Path) -> None:
    async def go() -> list[Result]:
        toolbox = opened(by_command(pids))
        try:
            first = await call(toolbox, ("close_down", {}))
            return first + await call(toolbox, ("price_of", {"fruit": "apple"}))
        finally:
            await toolbox.close()

    gone, apple = asyncio.run(go())
    assert gone.failed and "Connection closed" in gone.message["content"]
    assert (apple.failed, apple.message["content"]) == (False, "3.0")
    assert len(started(pids)) == 3 and ended(started(pids))


def test_half_a_character_costs_its_call_and_not_the_connection(pids: Path) -> None:
    """A model can write one, and others have calls at the same server."""

    async def go() -> list[Result]:
        toolbox = opened(by_command(pids))
        try:
            half = ToolCall("price_of", '{"fruit": "\\ud83d"}', "c0")
            apple = ToolCall("price_of", '{"fruit": "apple"}', "c1")
            return await toolbox.call([half, apple]) + await toolbox.call([apple])
        finally:
            await toolbox.close()

    half, apple, again = asyncio.run(go())
    assert half.failed and half.message["content"].startswith("error: wrong arguments: ")
    assert [apple.message["content"], again.message["content"]] == ["3.0", "3.0"]
    assert len(started(pids)) == 2


@pytest.mark.parametrize(
    ("name", "says"), [("odd", "did not return structured content"), ("refuse", "sold out")], ids=["none", "an error"]
)
def test_such_an_answer_costs_its_call_and_not_the_connection(pids: Path, name: str, says: str) -> None:
    """The client refuses what is not of the tool's own schema; others have calls at the same server.

    -32000 is JSON-RPC's code for any error of a server's own, and the client's for a connection that is closed.
    """

    async def go() -> list[Result]:
        toolbox = opened(by_command(pids))
        try:
            await call(toolbox, ("price_of", {}))  # it is there
            both = await call(toolbox, ("wait", {"seconds": 1}), (name, {}))
            return both + await call(toolbox, ("wait", {"seconds": 0}))
        finally:
            await toolbox.close()

    before, wrong, after = asyncio.run(go())
    assert wrong.failed and says in wrong.message["content"]
    assert [before.message["content"], after.message["content"]] == ["said", "said"]
    assert len(started(pids)) == 2 and ended(started(pids))


def test_a_call_has_a_deadline_and_the_server_goes_on(pids: Path) -> None:
    async def go() -> list[Result]:
        toolbox = opened(by_command(pids), timeout_s=2.0)
        try:
            await call(toolbox, ("price_of", {"fruit": "apple"}))  # it is there
            return await call(toolbox, ("wait", {"seconds": 60}), ("price_of", {"fruit": "apple"}))
        finally:
            await toolbox.close()

    waited, apple = asyncio.run(go())
    assert waited.failed and waited.message["content"] == "error: wait did not end within 2 s"
    assert apple.message["content"] == "3.0"
    assert len(started(pids)) == 2 and ended(started(pids))


def test_a_server_that_hangs_is_left_for_another(pids: Path) -> None:
    async def go() -> tuple[str, str]:
        server = McpServer(by_command(pids), look_s=0.3)
        try:
            before = await server.call("price_of", {"fruit": "apple"})
            os.kill(started(pids)[0], signal.SIGSTOP)
            with pytest.raises(EnvironmentFailedError, match="did not end within"):
                await within(lambda: server.call("price_of", {"fruit": "apple"}), 0.2, "price_of")
            while server._ready is not None:  # until it has been left
                await asyncio.sleep(0.02)
            return before, await server.call("price_of", {"fruit": "apple"})
        finally:
            await server.close()

    assert asyncio.run(asyncio.wait_for(go(), 300)) == ("3.0", "3.0")
    assert len(started(pids)) == 2 and ended(started(pids))


def test_a_server_that_starts_for_longer_than_a_call_may_take_is_there_in_the_end(pids: Path) -> None:
    """It is not started anew by each call that has no time left for it."""
    slow = f"import runpy, sys, time; time.sleep(3); sys.argv = ['plain', '{pids}']; runpy.run_path('{PLAIN}')"

    async def go() -> list[Result]:
        toolbox = opened(shlex.join([sys.executable, "-c", slow]), timeout_s=1.0)
        found: list[Result] = []
        try:
            while not found or found[-1].failed:
                found += await call(toolbox, ("price_of", {"fruit": "apple"}))
            return found
        finally:
            await toolbox.close()

    *early, last = asyncio.run(asyncio.wait_for(go(), 300))
    assert {each.message["content"] for each in early} == {"error: price_of did not end within 1 s"}
    assert last.message["content"] == "3.0" and len(started(pids)) == 2


def listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def address(pids: Path) -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([sys.executable, str(SHOP), str(pids), str(port)])
    try:
        end = time.monotonic() + 300
        while not listens(port):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def test_the_tools_behind_an_address(address: str) -> None:
    async def go() -> list[Result]:
        toolbox = opened(address)
        try:
            return await call(toolbox, ("price_of", {"fruit": "apple"}), ("price_of", {"fruit": "kiwi"}))
        finally:
            await toolbox.close()

    apple, kiwi = asyncio.run(go())
    assert apple.message["content"] == "3.0" and kiwi.failed


@pytest.mark.parametrize(
    ("places", "says"),
    [
        (("no-such-program --port 1",), "the MCP server 'no-such-program --port 1' is not there"),
        ((f"{sys.executable} -c pass",), "is not there"),
        (("http://127.0.0.1:1/mcp",), "the MCP server 'http://127.0.0.1:1/mcp' is not there"),
        (("PLAIN", "PLAIN"), "two tools have the name 'price_of', and calls go by name"),
    ],
)
def test_what_is_not_there_is_refused(pids: Path, places: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError) as caught:
        opened(*(by_command(pids) if each == "PLAIN" else each for each in places))
    assert says in str(caught.value)


def test_one_that_says_nothing_is_named_with_the_seconds_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_server, "CONNECT_S", 0.3)
    silent = shlex.join([sys.executable, "-c", "import time; time.sleep(600)"])
    with pytest.raises(UserError) as caught:
        opened(silent)
    says = f"agent.mcp: the MCP server {silent!r} is not there: it has not answered for 0.3 s. Wanted is a command"
    assert str(caught.value).startswith(says)


def test_a_deadline_of_the_server_begins_once_its_client_is_loaded(monkeypatch: pytest.MonkeyPatch, pids: Path) -> None:
    """On a busy node that takes longer than a server has."""
    order: list[str] = []
    load, answers = importlib.import_module, mcp_server._answers

    def loads(name: str) -> Any:
        order.append(name)
        return load(name)

    def begins(where: str) -> Any:
        order.append("deadline")
        return answers(where)

    monkeypatch.setattr(importlib, "import_module", loads)
    monkeypatch.setattr(mcp_server, "_answers", begins)
    opened(by_command(pids))
    assert order[0] == "mcp" and "deadline" in order
