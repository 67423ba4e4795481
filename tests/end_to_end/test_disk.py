"""Runs whose weights go through files: servers that die come back to them, and nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.core.platform import get_platform
from megarl.serving.client import ServerClient
from megarl.serving.process import start_all
from megarl.serving.server import ProcessPlace, ServerSpec
from megarl.sync.store import Store
from tests.end_to_end.harness import Driver, is_server, kill
from tests.support.forked_servers import Copies
from tests.support.served import START_S

pytestmark = pytest.mark.slow

SMALL = ("data.eval=null", "train.save_every=1000", "report.samples=0", "train.steps=1000", "sync.transport=disk")
CUT = ("cluster.devices=2", "actor.parallel.tp=2", "reference.parallel.tp=2")


def test_ranks_write_their_parts_and_servers_that_die_or_freeze_read_all_of_them(launch: Callable[..., Driver]) -> None:
    """Two ranks, a part of every tensor on each; two servers, which share what is put together on their node."""
    driver = launch("run.name=disk", *SMALL, *CUT, "rollout.servers=2", "sync.bucket_mb=1")
    driver.wait_for(lambda row: row["step"] >= 2 and row["sync/servers"] == 2)
    [folder] = driver.folder.glob("weights-*")
    assert folder.name.startswith(f"weights-{driver.run_id()}-")
    assert Store(folder, "model").versions()
    for stop in (signal.SIGKILL, signal.SIGSTOP):
        [victim, *_] = driver.pids(lambda command: is_server(command) and "-m megarl" in command)
        seen = driver.metrics()[-1]["step"]
        os.kill(victim, stop)
        driver.wait_for(lambda row, after=seen: row["step"] > after and row["sync/servers"] == 1)  # type: ignore[misc]
        driver.wait_for(lambda row, after=seen: row["step"] > after + 1 and row["sync/servers"] == 2)  # type: ignore[misc]
    rows = driver.metrics()
    assert rows[-1]["actor/kl_loss"] > 0, "the weights that came are others by then"
    for row in rows[1:]:
        assert row["rollout/failed"] == 0 and row["sync/probe_diff_max"] < 1e-4, row
    # Differences are smaller than the weights; a whole version comes now and then.
    sizes = {row["sync/bytes"] for row in rows}
    assert min(sizes) < 0.8 * max(sizes)
    kill([driver.process.pid])
    driver.finish(30)
    driver.assert_nothing_left(folder)
    assert folder.parent.exists()


def test_servers_of_somebody_else_read_versions_where_they_are_written(
    launch: Callable[..., Driver], inputs: Path, copies: Copies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run takes the same server: it still calls its model by its name."""
    place = ProcessPlace(tmp_path / "logs", "key-of-the-server", env={"GLOO_SOCKET_IFNAME": "lo"})
    monkeypatch.setenv("SOMEBODYS_KEY", place.api_key)
    server = copies.server(
        "theirs", ServerSpec(inputs / "model", "float32", kv_tokens=8192), get_platform("cpu"), place
    )
    shared = tmp_path / "shared"
    urls = f"rollout.servers={{urls: ['{server.endpoint.url}'], key_env: SOMEBODYS_KEY}}"
    try:
        start_all([server], START_S)
        for name in ("first", "second"):
            driver = launch(f"run.name=theirs-{name}", *SMALL, urls, f"sync.folder={shared}", "train.steps=3")
            code, out, error = driver.finish()
            assert code == 0, out + error
            rows = driver.metrics()
            assert all(row["sync/probe_diff_max"] < 1e-4 and row["sync/servers"] == 1 for row in rows[1:])
            assert rows[-1]["actor/kl_loss"] > 0
            driver.assert_nothing_left()
            assert list(shared.iterdir()) == []

        async def version() -> str:
            async with ServerClient(server.endpoint) as client:
                return await client.weight_version(10.0)

        assert server.alive() and asyncio.run(version()) == str(int(rows[-1]["sync/weight_version"]))
    finally:
        server.stop()
