"""The janitor ends exactly the processes of its run and removes their shared memory, whatever kills the driver."""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.core import janitor
from tests.support.processes import ended

# A process that maps a segment of shared memory, says so, and waits for ever, in a session of its own.
SLEEPER = """
import mmap, os, signal, sys
path = "/dev/shm/" + sys.argv[1]
file = open(path, "wb+"); file.truncate(4096); view = mmap.mmap(file.fileno(), 4096)
print("ready", flush=True)
signal.pause()
"""

# A driver: starts a janitor and a sleeper, then waits to be killed.
DRIVER = """
import os, pathlib, signal, subprocess, sys
from megarl.core import janitor
run_id, registry, folder, segment, detached = sys.argv[1:]
os.environ[janitor.RUN_ID_VARIABLE] = run_id
process = janitor.start(run_id, pathlib.Path(registry), folders=[pathlib.Path(folder)], detached=detached == "detached")
assert (process.poll() is not None) == (detached == "detached"), "who is no child has ended as one"
command = [sys.executable, "-c", pathlib.Path(folder, "sleeper.py").read_text(), segment]
child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
signal.pause()
"""


@pytest.fixture
def run_id() -> str:
    return secrets.token_hex(8)


def start_sleeper(run_id: str, segment: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, segment],
        env={**os.environ, janitor.RUN_ID_VARIABLE: run_id},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_clean_kills_only_its_own_run(run_id: str, tmp_path: Path) -> None:
    segment, other_segment = f"megarl-test-{run_id}", f"megarl-test-other-{run_id}"
    mine, other = start_sleeper(run_id, segment), start_sleeper("another-run", other_segment)
    folder = tmp_path / "temporary"
    folder.mkdir()
    try:
        cleaned = janitor.clean(run_id, tmp_path / "registry", folders=[folder])
        assert cleaned == janitor.Cleaned((mine.pid,), (segment,))
        assert mine.wait(5) == -signal.SIGKILL
        assert other.poll() is None
        assert not Path("/dev/shm", segment).exists()
        assert Path("/dev/shm", other_segment).exists()
        assert not folder.exists()
    finally:
        other.kill()
        other.wait()
        Path("/dev/shm", other_segment).unlink()


def test_what_a_run_has_mapped_of_others_stays(run_id: str, tmp_path: Path) -> None:
    """A table that a user has put there before the run, and one that a service of theirs makes meanwhile."""
    table, service = (Path("/dev/shm", f"megarl-test-{each}-{run_id}") for each in ("table", "service"))
    table.write_bytes(bytes(4096))
    guard = janitor.start(run_id, tmp_path / "registry")
    mine = [start_sleeper(run_id, each.name) for each in (table, service)]
    theirs = start_sleeper("another-run", service.name)
    try:
        cleaned = janitor.clean(run_id, tmp_path / "registry", but=[guard.pid])
        assert cleaned == janitor.Cleaned(tuple(sorted(each.pid for each in mine)), ())
        assert table.exists() and service.exists()
    finally:
        for process in (*mine, theirs, guard):
            process.kill()
            process.wait()
        for each in (table, service):
            each.unlink(missing_ok=True)


def test_folders_that_were_registered_go_with_the_run(run_id: str, tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    for folder in (mine, other):
        (folder / "inner").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    janitor.register_folder(tmp_path / "run" / "registry", mine)
    janitor.register_folder(tmp_path / "run" / "registry", tmp_path / "never made")
    janitor.clean(run_id, tmp_path / "run" / "registry")
    assert not mine.exists() and other.exists()


def test_clean_spares_the_named_pids(run_id: str, tmp_path: Path) -> None:
    spared = start_sleeper(run_id, f"megarl-test-{run_id}")
    try:
        assert janitor.clean(run_id, tmp_path / "registry", but=[spared.pid]).pids == ()
        assert spared.poll() is None
    finally:
        janitor.clean(run_id, tmp_path / "registry")
        spared.wait()


def test_what_a_killed_process_had_on_its_way_to_another_is_removed(run_id: str, tmp_path: Path) -> None:
    """No process has mapped it, and its name says whose it was."""
    sleeper, other = start_sleeper(run_id, f"megarl-test-{run_id}"), os.getpid()
    segments = [Path("/dev/shm", f"sgl_shm_mm_{pid}_{run_id[-8:]}") for pid in (sleeper.pid, other)]
    for segment in segments:
        segment.touch()
    try:
        assert segments[0].name in janitor.clean(run_id, tmp_path / "registry").segments
        assert [segment.exists() for segment in segments] == [False, True]
    finally:
        segments[1].unlink()
        sleeper.wait()


def test_registered_segments_are_removed_after_their_process_is_gone(run_id: str, tmp_path: Path) -> None:
    segment = Path("/dev/shm", f"megarl-test-{run_id}")
    segment.touch()
    registry = tmp_path / "registry"
    janitor.register_segments(registry, [segment.name, "../outside", "never-there"])
    assert janitor.clean(run_id, registry).segments == (segment.name,)
    assert not segment.exists()


def test_what_is_registered_after_a_machine_has_cleared_its_temporary_folder_is_removed_too(tmp_path: Path) -> None:
    """As systemd and others do after days. A server could not be started again then, and the end of the run failed."""
    registry, mine = tmp_path / "megarl-run" / "registry", tmp_path / "mine"
    mine.mkdir()
    janitor.register_segments(registry, [])
    janitor.register_folder(registry, mine)
    janitor.clean("nobody", registry, folders=[registry.parent])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("detached", ["attached", "detached"])
def test_a_killed_driver_leaves_nothing(run_id: str, tmp_path: Path, detached: str) -> None:
    folder, segment = tmp_path / "temporary", f"megarl-test-{run_id}"
    folder.mkdir()
    (folder / "sleeper.py").write_text(SLEEPER)
    words = [run_id, str(tmp_path / "registry"), str(folder), segment, detached]
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, *words], stdout=subprocess.PIPE)
    assert driver.stdout is not None
    child = int(driver.stdout.readline())
    watch = os.pidfd_open(child)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    ended, _, _ = select.select([watch], [], [], 10)
    os.close(watch)
    assert ended, "the child is still there 10 s after its driver was killed"
    for _ in range(100):
        if not folder.exists():
            break
        select.select([], [], [], 0.05)
    assert not folder.exists()
    assert not Path("/dev/shm", segment).exists()
    assert janitor.processes_of(run_id) == []


@pytest.mark.parametrize("told", ["kill $!", ""], ids=["it ends them", "it does not come to that"])
def test_a_raylets_agents_end_with_it_which_nobody_else_would_find(run_id: str, tmp_path: Path, told: str) -> None:
    """They carry no run's id. A raylet that is told to end ends them; one that does not is killed, and they are, too."""
    raylet = tmp_path / "raylet"
    raylet.write_text(f"#!/bin/bash\nMEGARL_RUN_ID= sleep 60 & trap '{told}' TERM\necho $!\nwait\nread\n")
    raylet.chmod(0o755)
    process = subprocess.Popen(
        [str(raylet)],
        env={**os.environ, janitor.RUN_ID_VARIABLE: run_id},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    agent = int(process.stdout.readline())
    janitor.kill_all([process.pid], raylet_s=0.5)
    assert process.wait() == -signal.SIGKILL
    assert ended([agent])
