"""Stacks are read from outside where that is allowed; where it is not, it is said why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.cluster import stacks
from megarl.core.process_state import stopped
from tests.support.processes import ended

CODE = "import time\ndef here_it_sleeps():\n    print('up', flush=True)\n    time.sleep(600)\nhere_it_sleeps()"


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        yield process.pid
        process.kill()


@pytest.mark.needs("py-spy")
def test_a_stopped_process_is_told_from_one_that_waits_and_from_one_that_has_ended(sleeper: int) -> None:
    assert stopped(sleeper) is None
    os.kill(sleeper, signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper, os.WSTOPPED)
    found = stopped(sleeper)
    assert found is not None and str(found).endswith(f"(pid {sleeper}, stopped by a signal)")
    assert "here_it_sleeps" in stacks.foreign_stack(sleeper)
    os.kill(sleeper, signal.SIGCONT)
    os.kill(sleeper, signal.SIGKILL)
    assert ended([sleeper])
    assert stopped(sleeper) is None


def test_why_there_is_no_stack(sleeper: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = tmp_path / "py-spy"
    refusing.write_text("#!/bin/sh\necho 'Permission Denied: Try running again' >&2; exit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(stacks, "PTRACE_SCOPE", tmp_path / "scope")
    assert "SYS_PTRACE" in stacks.foreign_stack(sleeper)
    (tmp_path / "scope").write_text("1\n")
    assert "ptrace_scope is 1" in stacks.foreign_stack(sleeper)
    refusing.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not installed" in stacks.foreign_stack(sleeper)
