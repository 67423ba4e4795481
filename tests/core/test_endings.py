"""Exit codes and signals of processes that somebody else has started."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time

import pytest

from megarl.core.endings import Ending, Endings
from megarl.core.process_state import started_at

# The kernel tells others since 6.15; before that nobody can know, and nothing may be said.
TELLS = tuple(map(int, platform.release().split(".")[:2])) >= (6, 15)
# A process that starts another, says which, and asks for its code as that ends.
PARENT = "import subprocess, sys; p = subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True); p.wait()"
WAITS = "import os, sys; sys.stdin.read(); "


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("os.kill(os.getpid(), 9)", "It was ended by SIGKILL: somebody's kill -9"),
        ("os.kill(os.getpid(), 11)", "It was ended by SIGSEGV: it crashed in native code."),
        ("sys.exit(3)", "It exited with code 3."),
        ("os._exit(0)", "It exited with code 0."),
        ("os.kill(os.getpid(), 40)", "It was ended by signal 40."),
    ],
)
def test_how_a_grandchild_ended_is_told(end: str, words: str) -> None:
    endings = Endings()
    command = [sys.executable, "-c", PARENT, sys.executable, "-c", WAITS + end]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        pid = int(parent.stdout.readline())
        started = started_at(pid)
        endings.watch(pid, started)
        endings.watch(pid, started)  # as often as one likes
        endings.watch(pid, started - 1)  # another one, which had this pid before
        parent.stdin.close()
        parent.wait(20)
    assert endings.told(pid, started - 1) == Ending()
    told = endings.told(pid, started)
    assert told.how.startswith(words) if TELLS else told.how == "", told
    assert told.held.endswith(" GB when it was last looked at.")
    assert endings.told(pid, started) == Ending(), "nobody holds on to it any more"


def test_nothing_is_said_of_what_was_gone_before_and_nothing_is_held_in_the_end() -> None:
    files, endings = len(os.listdir("/proc/self/fd")), Endings()
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        started = started_at(process.pid)
        process.wait(20)
    endings.watch(process.pid, started)
    assert endings.told(process.pid, started) == Ending()
    endings.watch(os.getpid(), started_at(os.getpid()))
    assert len(os.listdir("/proc/self/fd")) == files + 1
    [looks] = [each for each in threading.enumerate() if each.name == "endings"]
    del endings
    looks.join(20)
    assert not looks.is_alive()
    assert len(os.listdir("/proc/self/fd")) == files


def test_memory_is_that_of_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.core.endings.LOOK_EVERY_S", 0.01)
    grows = "import sys; held = bytearray(300_000_000); print(flush=True); sys.stdin.read()"
    endings = Endings()
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read(1); " + grows], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        key = process.pid, started_at(process.pid)
        endings.watch(*key)
        process.stdin.write(b"x")
        process.stdin.flush()
        process.stdout.readline()
        end = time.monotonic() + 20
        while endings._watched[key].held < 3e8:
            assert time.monotonic() < end
            time.sleep(0.01)
        process.kill()
    assert endings.told(*key).held == "It held 0.3 GB when it was last looked at."


def test_those_that_have_ended_are_let_go_of_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.core.endings.MOST", 2)
    files, endings = _held(), Endings()
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            endings.watch(process.pid, started_at(process.pid))
    here = os.getpid(), started_at(os.getpid())
    endings.watch(*here)
    assert _held() <= files + 2
    assert endings._watched.keys() >= {here}


def _held() -> int:
    """Descriptors of processes that this one has open; other threads open and close files."""
    with os.scandir("/proc/self/fd") as files:
        return sum("pidfd" in _target(file.path) for file in files)


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile
        return ""
