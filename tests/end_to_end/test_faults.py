"""Runs that are killed: a clear error, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end.harness import Driver, is_rank, is_server, kill, pasted
from tests.end_to_end.test_sft_and_eval import SFT_RECIPE

pytestmark = pytest.mark.slow

Launch = Callable[..., Driver]


def own_words(error: str) -> str:
    """What megarl says itself: without the logs that it shows."""
    return error.partition("--- end of")[0]


LONG = ("train.steps=1000", "train.save_every=1000", "data.eval=null")
SAVING = (*LONG, "train.save_every=1")


def test_a_killed_rank_is_named(launch: Launch) -> None:
    driver = launch("run.name=killed-rank", "cluster.max_recoveries=0", *SAVING)
    driver.wait_for_step(1)
    kill(driver.pids(is_rank))
    code, _, error = driver.finish(60)
    assert code == 1
    assert "rank 0 (pid " in error and "died during" in error
    assert "Traceback" not in own_words(error) and "UserWarning" not in error
    assert re.search(r"The last good checkpoint is \S+/killed-rank/checkpoints/step_00000\d, of step \d\.", error)
    assert pasted(error)[-1] == "--resume"
    driver.assert_nothing_left()


def test_the_only_server_killed_comes_back_and_killed_too_often_ends_the_run(launch: Launch) -> None:
    driver = launch("run.name=killed-server", "rollout.max_restarts=1", *LONG)
    driver.wait_for_step(1)
    kill(driver.pids(is_server))
    driver.wait_for(lambda row: row["rollout/server_restarts"] == 1)
    last = driver.metrics()[-1]["step"]
    driver.wait_for_step(last + 1)
    rows = driver.metrics()
    assert all(row["sync/servers"] == 1 for row in rows)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    # No sample of any step was lost, and every step has all of its figures.
    assert {row["rollout/num_samples"] for row in rows[1:]} == {16} and {row["rollout/failed"] for row in rows[1:]} == {
        0
    }
    assert {frozenset(row) for row in rows[2:]} == {frozenset(rows[1])}
    kill(driver.pids(is_server))
    code, _, error = driver.finish(60)
    assert code == 1
    assert "sglang server 0 died, and rollout.max_restarts allows 1 within 60 minutes" in error
    assert "Deaths so far: sglang server 0 2." in error and "SIGKILL" in error
    assert "Traceback" not in own_words(error)
    log = (driver.folder / "logs" / "driver.log").read_text()
    assert re.search(
        r"server 0 left the pool, 0 remain, and is started again \(restart 1\): It was ended by signal 9", log
    )
    assert re.search(r"server 0 is back after \d+ s, weights of version \d+ verified", log)
    assert "No checkpoint had been committed yet" in error and pasted(error)[-1] == "--continue"
    driver.assert_nothing_left()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that holds two checkpoints, and not three."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_full_in_mid_run(inputs: Path, small_disk: Path) -> None:
    """Named, with the checkpoint that is whole; once there is room, the command that was printed goes on."""
    recipe = inputs / "small.yaml"
    recipe.write_text(SFT_RECIPE.format(folder=inputs))
    saving = [
        "train.save_every=1",
        "train.keep_last=9",
        "train.steps=4",
        "cluster.devices=1",
        "report.tensorboard=false",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "megarl", "sft", str(recipe), f"run.dir={small_disk}", *saving]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"megarl: A disk is full ({small_disk}: " in done.stderr and "MB are free" in done.stderr
    checkpoints = small_disk / "sft" / "checkpoints"
    last = max(checkpoints.iterdir())
    assert "Make room there first" in done.stderr and f"The last good checkpoint is {last}, of step " in done.stderr
    assert [path for path in checkpoints.iterdir() if path.name.startswith(".")] == []
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    assert pasted(done.stderr) == [*command, "--resume"]
    again = subprocess.run(pasted(done.stderr), capture_output=True, text=True, check=False, env=environment)
    assert again.returncode == 0, again.stderr
    assert (checkpoints / "step_000004").is_dir()
    rows = (small_disk / "sft" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4]
