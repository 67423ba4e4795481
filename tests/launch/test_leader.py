"""The leader of a job and its driver, without nodes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.core.errors import StoppedError
from megarl.core.stop import STOP_SIGNAL
from megarl.launch.leader import Allocation, Leader, Plan
from megarl.launch.words import Message

DRIVER = """
import sys, time
time.sleep(0.1)  # imports
from megarl.core.stop import StopRequest
with StopRequest() as stop:
    time.sleep(0.01)
    sys.exit(75 if stop.asked else 3)
"""


def leader_of(folder: Path, *driver: str) -> Leader:
    plan = Plan(driver, folder, (), folder / "events.jsonl", folder / "metrics.jsonl", 1.0)
    return Leader(Allocation("7", ("here",), 0, ""), plan)


@pytest.mark.parametrize(("number", "lost"), [(STOP_SIGNAL, ["b"]), (signal.SIGTERM, [])])
def test_a_lost_node_is_one_also_where_the_time_limit_comes_near_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, lost: list[str]
) -> None:
    """The driver has ended with an error; who still says that it is there is asked now."""
    monkeypatch.setattr("megarl.launch.leader.SILENT_S", 0.05)
    leader, nodes = leader_of(tmp_path), SimpleNamespace(names=("a", "b"))
    leader._signal(number, None)
    leader._events.put(("node", 0, Message("alive", "a", "10.0.0.1")))
    found: Any = nodes
    assert leader._lost(found) == lost


def test_a_request_to_stop_that_comes_before_the_driver_listens_reaches_it(tmp_path: Path) -> None:
    leader, nodes = leader_of(tmp_path, sys.executable, "-c", DRIVER), SimpleNamespace(names=("here",))
    leader._signal(STOP_SIGNAL, None)
    found: Any = nodes
    assert leader._drive(found) == StoppedError.exit_code
