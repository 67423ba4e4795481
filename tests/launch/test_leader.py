"""The leader of a job and its driver, without nodes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megarl.core.errors import StoppedError
from megarl.core.stop import STOP_SIGNAL
from megarl.launch.leader import Allocation, Leader, Plan

DRIVER = """
import sys, time
time.sleep(0.1)  # imports
from megarl.core.stop import StopRequest
with StopRequest() as stop:
    time.sleep(0.01)
    sys.exit(75 if stop.asked else 3)
"""


def test_a_request_to_stop_that_comes_before_the_driver_listens_reaches_it(tmp_path: Path) -> None:
    driver = (sys.executable, "-c", DRIVER)
    plan = Plan(driver, tmp_path, (), tmp_path / "events.jsonl", tmp_path / "metrics.jsonl", 1.0)
    leader, nodes = Leader(Allocation("7", ("here",), 0, ""), plan), SimpleNamespace(names=("here",))
    leader._signal(STOP_SIGNAL, None)
    found: Any = nodes
    assert leader._drive(found) == StoppedError.exit_code
