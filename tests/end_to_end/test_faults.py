"""Runs that are killed: a clear error, and nothing left behind."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.end_to_end.harness import Driver, is_server, kill, own_words, pasted

pytestmark = pytest.mark.slow

Launch = Callable[..., Driver]


LONG = ("train.steps=1000", "train.save_every=1000", "data.eval=null")


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
