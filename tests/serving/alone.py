"""Runs a script in a process of its own, as a rank or server would have its environment: what it imports stays there."""

from __future__ import annotations

import os
import subprocess
import sys

from megarl.core.platform import get_platform


def run_alone(script: str) -> None:
    """The script has to come to its end, where it prints `done`."""
    found = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **get_platform("cpu").env},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split()[-1] == "done"
