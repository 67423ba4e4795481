"""Runs on servers that somebody else started: they get its weights, may go and come back, and are there after it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.core.platform import get_platform
from megarl.core.ports import free_port
from megarl.serving.client import ServerClient
from megarl.serving.process import start_all
from megarl.serving.sampling import Sampling
from megarl.serving.server import ProcessPlace, ServerProcess, ServerSpec
from tests.end_to_end.harness import SLOWLY, Driver, assert_says_how_to_go_on
from tests.support.forked_servers import Copies
from tests.support.served import START_S
from tests.support.turnstile import Turnstile

pytestmark = pytest.mark.slow

KEY = "key-of-somebody-elses-servers"
STALE = ("rollout.max_staleness=1", "rollout.in_flight=in_place")
SMALL = ("data.eval=null", "train.save_every=2", "report.samples=0")


@pytest.fixture
def servers(inputs: Path, copies: Copies, tmp_path: Path) -> Iterator[list[ServerProcess]]:
    """Two servers of the model, as somebody starts them who knows nothing of the run."""
    place = ProcessPlace(tmp_path / "logs", KEY, env={"GLOO_SOCKET_IFNAME": "lo"})
    spec = ServerSpec(inputs / "model", "float32", kv_tokens=8192)
    made = [copies.server(f"somebody's {index}", spec, get_platform("cpu"), place) for index in range(2)]
    try:
        start_all(made, START_S)
        yield made
    finally:
        for server in made:
            server.stop()


def test_servers_of_somebody_else_come_and_go_and_outlive_two_runs(
    launch: Callable[..., Driver], servers: list[ServerProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run takes a server that has loaded versions of the first: it still calls its model by its name."""
    monkeypatch.setenv("SOMEBODYS_KEY", KEY)
    killed, kept = servers
    versions_are_read_where_they_are_written(launch, kept, tmp_path / "shared")
    with Turnstile(kept.endpoint.url, free_port()) as gate:
        urls = f"rollout.servers={{urls: ['{killed.endpoint.url}', '{gate.url}'], key_env: SOMEBODYS_KEY}}"
        setting = ("run.name=external", urls, *STALE, *SMALL, "train.steps=1000", SLOWLY)
        driver = launch(*setting)
        driver.wait_for(lambda row: row["step"] >= 2 and row["sync/servers"] == 2)
        # One cannot be reached: the run goes on with the other, and with both once it can be again.
        gate.close()
        driver.wait_for(lambda row: row["sync/servers"] == 1)
        back = driver.metrics()[-1]["step"]
        gate.open()
        driver.wait_for(lambda row: row["step"] > back and row["sync/servers"] == 2)
        # One ends for good: nobody starts it again, and the run does not need it.
        os.kill(killed.pid, signal.SIGKILL)
        driver.wait_for(lambda row: row["rollout/server_restarts"] == 2)
        last = driver.metrics()[-1]["step"]
        driver.wait_for_step(last + 2)
        driver.process.send_signal(signal.SIGTERM)
        code, out, error = driver.finish(120)
    assert code == 143, out + error
    assert_says_how_to_go_on(driver, signal.SIGTERM, error, setting)
    rows = driver.metrics()
    assert [row["step"] for row in rows] == list(range(len(rows)))
    for row in rows[1:]:
        assert row["rollout/failed"] == 0 and row["sync/probe_diff_max"] < 1e-4, row
    assert rows[-1]["sync/servers"] == 1 and rows[-1]["actor/kl_loss"] > 0, "the weights that came are others by then"
    said = (driver.folder / "logs" / "driver.log").read_text()
    assert "external server 1 left the pool, 1 remain, and is looked for again (restart 1)" in said
    assert "external server 1 is back after" in said and "external server 0 is back" not in said
    assert "did not leave the group" not in said
    left_untouched(kept, rows[-1]["sync/weight_version"])
    # The key is nowhere but in the environment of whoever started the run.
    files = [path for path in driver.folder.rglob("*") if path.is_file()]
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert KEY not in out + error
    driver.assert_nothing_left()


def versions_are_read_where_they_are_written(
    launch: Callable[..., Driver], server: ServerProcess, shared: Path
) -> None:
    """The run's weights go through files, and none of them is left."""
    urls = f"rollout.servers={{urls: ['{server.endpoint.url}'], key_env: SOMEBODYS_KEY}}"
    driver = launch("run.name=read", urls, *SMALL, "sync.transport=disk", f"sync.folder={shared}", "train.steps=3")
    code, out, error = driver.finish()
    assert code == 0, out + error
    rows = driver.metrics()
    assert all(row["sync/probe_diff_max"] < 1e-4 and row["sync/servers"] == 1 for row in rows[1:])
    assert rows[-1]["actor/kl_loss"] > 0
    driver.assert_nothing_left()
    assert list(shared.iterdir()) == []
    left_untouched(server, rows[-1]["sync/weight_version"])


def left_untouched(server: ServerProcess, version: float) -> None:
    """The server goes on: it is not paused, is ready for other weights, and has the last ones of the run."""

    async def ask() -> None:
        async with ServerClient(server.endpoint) as client:
            answer = await client.generate([5, 6, 7], Sampling(4), 30.0)
            assert {span.version for span in answer.versions} == {int(version)}
            await client.begin_weight_update(10.0)
            await client.end_weight_update(10.0)

    assert server.alive()
    asyncio.run(ask())
