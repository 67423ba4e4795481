"""Runs that are killed: a clear error, and nothing left behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.end_to_end.harness import is_rank, is_server, kill, start

pytestmark = pytest.mark.slow

LONG = ("train.steps=1000", "train.save_every=1000", "data.eval=null")


def test_a_killed_rank_is_named(inputs: Path) -> None:
    driver = start(inputs, "run.name=killed-rank", *LONG)
    driver.wait_for_step(1)
    kill(driver.pids(is_rank))
    code, _, error = driver.finish(60)
    assert code == 1
    assert "rank 0 (pid " in error and "died during" in error
    assert "Traceback" not in error
    driver.assert_nothing_left()


def test_the_last_server_killed_is_named(inputs: Path) -> None:
    driver = start(inputs, "run.name=killed-server", *LONG)
    driver.wait_for_step(1)
    kill(driver.pids(is_server))
    code, _, error = driver.finish(60)
    assert code == 1
    assert "sglang server 0" in error and "no server remains" in error and "SIGKILL" in error
    assert "Traceback" not in error
    driver.assert_nothing_left()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130), (signal.SIGTERM, 130)]
)
def test_an_ended_driver_leaves_nothing(inputs: Path, number: signal.Signals, code: int) -> None:
    driver = start(inputs, f"run.name=driver-{number.name}", *LONG)
    driver.wait_for_step(1)
    driver.pids(is_rank)
    driver.process.send_signal(number)
    assert driver.finish(30)[0] == code
    driver.assert_nothing_left()
