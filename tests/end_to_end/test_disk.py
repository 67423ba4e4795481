"""A run whose weights go through files: servers that die come back to them; those that die too often end the run."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.serving.process import process_tree
from megarl.sync.store import Store
from tests.end_to_end.harness import SLOWLY, Driver, is_server, kill, own_words, pasted

pytestmark = pytest.mark.slow

SMALL = (
    "data.eval=null",
    "train.save_every=1000",
    "report.samples=0",
    "train.steps=1000",
    "sync.transport=disk",
    SLOWLY,
)
CUT = ("cluster.devices=2", "actor.parallel.tp=2", "reference.parallel.tp=2")
SERVERS = ("rollout.servers=2", "rollout.max_restarts=2", "sync.bucket_mb=1")


def is_main(command: str) -> bool:
    """A server itself, without the processes that it has started."""
    return is_server(command) and "-m megarl" in command


def mains(driver: Driver) -> list[int]:
    """The servers themselves. What one of them starts is a copy of it for a moment, with its command."""
    found = driver.pids(is_main)
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in found}
    return [pid for pid in found if parents[pid] not in found]


def scheduler_of(server: int) -> int:
    """The process of a server that computes; its main process answers beside it."""
    named = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in process_tree(server)}
    scheduler = next((pid for pid, name in named.items() if b"scheduler" in name), None)
    assert scheduler is not None, f"of {named}, none is its scheduler"
    return scheduler


def test_ranks_write_their_parts_and_servers_that_die_or_freeze_read_all_of_them(launch: Callable[..., Driver]) -> None:
    """Two ranks, a part of every tensor on each; two servers, which share what is put together on their node."""
    driver = launch("run.name=disk", *SMALL, *CUT, *SERVERS)
    driver.wait_for(lambda row: row["step"] >= 2 and row["sync/servers"] == 2)
    [folder] = driver.folder.glob("weights-*")
    assert folder.name.startswith(f"weights-{driver.run_id()}-")
    assert Store(folder, "model").versions()
    # Nobody is left: what was asked for waits for the one that comes back first.
    before = driver.metrics()[-1]["step"]
    frozen, killed = mains(driver)
    os.kill(scheduler_of(frozen), signal.SIGSTOP)
    os.kill(killed, signal.SIGKILL)
    driver.wait_for(
        lambda row: row["step"] > before and row["rollout/server_restarts"] == 2 and row["sync/servers"] == 2
    )
    driver.wait_for_step(driver.metrics()[-1]["step"] + 1)
    rows = driver.metrics()
    kill(driver.pids(is_server))
    code, _, error = driver.finish(60)
    assert code == 1
    assert re.search(r"sglang server \d died, and rollout\.max_restarts allows 2 within 60 minutes", error), error
    deaths = re.search(r"Deaths so far: sglang server \d (\d), sglang server \d (\d)\.", error)
    assert deaths is not None and sum(map(int, deaths.groups())) == 3 and "SIGKILL" in error, error
    assert "Traceback" not in own_words(error)
    assert "No checkpoint had been committed yet" in error and pasted(error)[-1] == "--continue"
    driver.assert_nothing_left(folder)
    assert folder.parent.exists()
    assert rows[-1]["actor/kl_loss"] > 0, "the weights that came are others by then"
    assert [row["step"] for row in rows] == list(range(len(rows)))
    # No sample of any step was lost, and every step has all of its figures.
    for row in rows[1:]:
        assert row["rollout/failed"] == 0 and row["rollout/num_samples"] == 16 and row["sync/probe_diff_max"] < 1e-4, (
            row
        )
    assert {frozenset(row) for row in rows[2:]} == {frozenset(rows[1])}
    # Differences are smaller than the weights; a whole version comes now and then.
    sizes = {row["sync/bytes"] for row in rows}
    assert min(sizes) < 0.8 * max(sizes)
    log = (driver.folder / "logs" / "driver.log").read_text()
    assert re.search(
        r"server \d left the pool, 1 remain, and is started again \(restart 1\): It was ended by signal 9", log
    )
    assert re.search(r"server \d left the pool, 0 remain, and is started again \(restart 2\)", log)
    assert re.search(r"server \d is back after \d+ s, weights of version \d+ verified", log)
