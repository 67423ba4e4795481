"""Runs that are killed: a clear error, and nothing left behind."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.end_to_end.harness import Driver, is_rank, is_server, kill

pytestmark = pytest.mark.slow

Launch = Callable[..., Driver]


def own_words(error: str) -> str:
    """What megarl says itself: without the logs that it shows."""
    return error.partition("--- end of")[0]


LONG = ("train.steps=1000", "train.save_every=1000", "data.eval=null")


def test_a_killed_rank_is_named(launch: Launch) -> None:
    driver = launch("run.name=killed-rank", *LONG)
    driver.wait_for_step(1)
    kill(driver.pids(is_rank))
    code, _, error = driver.finish(60)
    assert code == 1
    assert "rank 0 (pid " in error and "died during" in error
    assert "Traceback" not in own_words(error)
    driver.assert_nothing_left()


def test_the_last_server_killed_is_named(launch: Launch) -> None:
    driver = launch("run.name=killed-server", *LONG)
    driver.wait_for_step(1)
    kill(driver.pids(is_server))
    code, _, error = driver.finish(60)
    assert code == 1
    assert "sglang server 0" in error and "no server remains" in error and "SIGKILL" in error
    assert "Traceback" not in own_words(error)
    driver.assert_nothing_left()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130), (signal.SIGTERM, 130)]
)
def test_an_ended_driver_leaves_nothing(launch: Launch, number: signal.Signals, code: int) -> None:
    driver = launch(f"run.name=driver-{number.name}", *LONG)
    driver.wait_for_step(1)
    driver.pids(is_rank)
    driver.process.send_signal(number)
    assert driver.finish(30)[0] == code
    driver.assert_nothing_left()
