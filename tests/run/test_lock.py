"""A run's folder while another process has it: a real one, which is then killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.run.lock import LOCK, check_unlocked, locked

HOLDS = """
import pathlib, sys
from megarl.run.lock import locked
with locked(pathlib.Path(sys.argv[1])):
    print("has it", flush=True)
    sys.stdin.read()
"""


def test_a_folder_that_another_process_has_is_refused_until_it_has_ended(tmp_path: Path) -> None:
    check_unlocked(tmp_path)
    assert list(tmp_path.iterdir()) == [], "to look leaves nothing"
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "has it\n"
        says = rf"{tmp_path} is in use: process {other.pid} on .* writes this run"
        with pytest.raises(UserError, match=says), locked(tmp_path):
            pass
        with pytest.raises(UserError, match=says):
            check_unlocked(tmp_path)
        other.kill()
    with locked(tmp_path):
        assert (tmp_path / LOCK).read_text().startswith("process ")
    check_unlocked(tmp_path)
    with locked(tmp_path):  # again in the same process: a life of the run is over
        pass
