"""Beside a server that somebody else started: it is waited for until it fits, and nothing of a run is left at it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from megarl.cluster import external
from megarl.cluster.external import ExternalActor, Found
from megarl.cluster.network import address_towards
from megarl.cluster.process import ProcessFacts, ProcessSpec
from megarl.core.errors import DeadlineError, UnfitServerError
from megarl.core.ports import free_port
from megarl.serving.client import ServerClient, ServerEndpoint
from megarl.serving.external import ExternalPool, check_run
from tests.serving.test_external import EXPECTED, Pool
from tests.support.fake_sglang import KEY

NO_SESSION = (400, "no weight-update session is open")


class Server(Pool):
    """Says what it serves, and takes what a run tells it."""

    async def respond(self, path: str, body: dict[str, Any]) -> web.Response:
        if path in ("/model_info", "/server_info", "/tokenize"):
            return await super().respond(path, body)
        if path == "/update_weight_version":
            self.label = body["new_version"]
        return web.json_response({"success": True})

    def told(self) -> list[str]:
        """What changes something at it, in order."""
        return [path for path, _ in self.calls if path not in ("/model_info", "/server_info", "/tokenize", "/health")]


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ExternalActor]:
    """Makes actors without processes, which look often."""
    monkeypatch.setattr(external, "configure_process", lambda spec: ProcessFacts(1, "host"))
    for name in ("LOOK_S", "CONNECT_EVERY_S"):
        monkeypatch.setattr(external, name, 0.01)
    monkeypatch.setattr("megarl.serving.vigil.ASK_S", 0.01)
    monkeypatch.setattr(external, "GONE_S", 0.1)

    def made(url: str, answer_s: float = 600.0, run: str = "") -> ExternalActor:
        server = ServerEndpoint("external server 0", url, KEY, run=run)
        process = ProcessSpec("external server 0", Path("logs"))
        return ExternalActor(process, server, replace(EXPECTED, run=run), answer_s)

    return made


def test_what_an_earlier_run_left_is_undone_and_nothing_is_left_of_this_one(
    beside: Callable[..., ExternalActor],
) -> None:
    async def go() -> None:
        async with Server() as server:
            actor = beside(server.endpoint.url)
            started = await actor.start(10.0)
            assert (started.endpoint.tp, started.pid) == (2, 0) and started.endpoint.since > 0
            assert await actor.pause(True, 1.0) == ""
            server.refuse["/end_weight_update"] = NO_SESSION
            await actor.stop()
            undone = ["/end_weight_update", "/continue_generation"]
            assert server.told() == [*undone, "/pause_generation", *undone]
            assert server.bodies("/pause_generation") == [{"mode": "in_place"}]
            assert set(server.keys) == {f"Bearer {KEY}"}

    asyncio.run(go())


def test_a_run_does_not_send_its_weights_where_another_one_does(beside: Callable[..., ExternalActor]) -> None:
    """Each starts at version 1: nothing else would tell the weights of the two from each other."""

    async def go() -> None:
        async with Server() as server:
            url = server.endpoint.url
            first = beside(url, run="a-1")
            started = await first.start(10.0)
            assert (server.label, started.endpoint.run) == ("default@a-1", "a-1")
            async with ServerClient(started.endpoint) as client:
                await client.set_weight_version(7)
            assert server.label == "7@a-1"
            second = beside(url, run="b-2")
            with pytest.raises(DeadlineError, match=r"gets its weights from the run a-1.*'\{\"new_version\": \"7\""):
                await second.start(0.05)
            before = server.told()
            await second.stop()
            assert (server.told(), server.label) == (before, "7@a-1")
            # The first one again, after its driver was killed; at its end nobody has the server.
            again = beside(url, run="a-1")
            await again.start(10.0)
            await again.stop()
            assert server.label == "7"
            await beside(url, run="b-2").start(10.0)
            assert server.label == "7@b-2"
            # Who took it at the same moment: whose weights come second finds out.
            async with ServerClient(started.endpoint) as client:
                with pytest.raises(UnfitServerError, match="gets its weights from the run b-2"):
                    await check_run(client, 5.0)

    asyncio.run(go())


def test_a_server_is_waited_for_until_it_serves_what_it_should(beside: Callable[..., ExternalActor]) -> None:
    async def go() -> None:
        async with Server() as server:
            server.refuse["/model_info"] = (503, "starting")
            finding = asyncio.create_task(beside(server.endpoint.url).start(10.0))
            while len(server.calls) < 3:
                await asyncio.sleep(0.01)
            assert not finding.done()
            server.refuse.clear()
            assert (await finding).endpoint.url == server.endpoint.url

    asyncio.run(go())


def test_one_that_does_not_come_is_given_up_with_what_was_wrong(beside: Callable[..., ExternalActor]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(DeadlineError, match=rf"in vain for 0\.05 s \(deadlines\.start_s\)\. .*{url} does not answer"):
        asyncio.run(beside(url).start(0.05))


def test_the_end_of_a_server_is_seen_and_so_is_its_silence(beside: Callable[..., ExternalActor]) -> None:
    async def go() -> None:
        async with Server() as server:
            url = server.endpoint.url
            ending = asyncio.create_task(beside(url).watch())
            while not server.calls:
                await asyncio.sleep(0.01)
            assert not ending.done()
        how = await asyncio.wait_for(ending, 30.0)
        assert how.startswith(f"Nobody listens at {url} any more") and KEY not in how
        async with Server() as silent:
            silent.refuse["/health"] = (503, "")
            paused = beside(silent.endpoint.url, answer_s=0.05)
            await paused.pause(False, 1.0)  # one that is paused may let the question wait
            waiting = asyncio.create_task(paused.watch())
            assert "gave no answer" in await asyncio.wait_for(beside(silent.endpoint.url, answer_s=0.05).watch(), 30.0)
            assert not waiting.done()
            await paused.resume(1.0)
            assert "gave no answer" in await asyncio.wait_for(waiting, 30.0)

    asyncio.run(go())


def test_the_router_opens_with_what_opens_the_servers() -> None:
    runtime: Any = SimpleNamespace(api_key="the run's")
    keys = {}
    for key in (KEY, ""):
        pool = ExternalPool((ServerEndpoint("external server 0", "http://far:1", key),), EXPECTED)
        source = Found(runtime, pool, 600.0)
        keys[key] = source.api_key
        assert source.direct == ("far",) and source.count == 1
    assert keys == {KEY: KEY, "": "the run's"}


def test_a_run_is_reached_where_its_servers_are() -> None:
    assert address_towards([]) == address_towards(["127.0.0.1", "localhost"]) == ""
