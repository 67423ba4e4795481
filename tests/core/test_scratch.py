"""The temporary folder of a run: used by this process and its children, and gone afterwards, also where it is killed."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from megarl.core import janitor
from megarl.core.errors import UserError
from megarl.core.scratch import BOOT, REGISTRY, TMPDIR, Scratch, mark

DRIVER = """
import os, signal, tempfile
from megarl.core.scratch import Scratch
scratch = Scratch.open()
tempfile.mkdtemp()
print(scratch.folder, flush=True)
signal.pause()
"""


def test_temporary_files_go_with_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TMPDIR, str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Scratch.open() as scratch:
        made = [tempfile.mkdtemp(), subprocess.check_output(["mktemp"], text=True).strip()]
        assert all(Path(path).is_relative_to(scratch.folder) and Path(path).exists() for path in made)
    assert list(tmp_path.iterdir()) == []
    assert os.environ[TMPDIR] == tempfile.gettempdir() == str(tmp_path)


def test_what_a_loss_of_power_has_left_goes_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No janitor saw to it. What is of another machine, whose temporary folder this may be as well, stays; so does one in use."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lost, used, foreign, unmarked, other = (
        tmp_path / name for name in ("megarl-a", "megarl-b", "megarl-c", "megarl-d", "x")
    )
    for folder in (lost, used, foreign, unmarked, other):
        (folder / "tmp").mkdir(parents=True)
    mark(used)
    for folder, host in ((lost, socket.gethostname()), (foreign, "elsewhere"), (other, socket.gethostname())):
        (folder / BOOT).write_text(f"{host} 5e0c91d2-0000")
    with Scratch.open() as scratch:
        assert {*tmp_path.iterdir()} == {used, foreign, unmarked, other, scratch.folder}


def test_what_is_left_where_the_janitor_was_killed_too_goes_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a scheduler does, which ends all of a job at once. Processes of another container are not seen here, and keep theirs."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True, env={**os.environ, TMPDIR: str(tmp_path)}
    )
    assert driver.stdout is not None
    folder, foreign = Path(driver.stdout.readline().strip()), tmp_path / "megarl-c"
    foreign.mkdir()
    (foreign / BOOT).write_text((folder / BOOT).read_text().replace("pid:[", "pid:[1"))
    segment = janitor.SHARED_MEMORY / f"megarl-test-{os.getpid()}"
    monkeypatch.setenv(TMPDIR, str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    try:
        segment.touch()
        janitor.register_segments(folder / REGISTRY, [segment.name])
        with Scratch.open() as scratch:
            assert {*tmp_path.iterdir()} == {folder, foreign, scratch.folder} and segment.exists()
        janitor.kill_all([int(pid) for pid in subprocess.check_output(["pgrep", "-f", str(folder)]).split()])
        driver.kill()
        driver.wait()
        assert folder.exists()
        with Scratch.open() as scratch:
            assert {*tmp_path.iterdir()} == {foreign, scratch.folder} and not segment.exists()
    finally:
        driver.kill()
        segment.unlink(missing_ok=True)


def test_a_folder_that_cannot_be_written_into_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that is full. It has no mark by which it would be swept, and each further try would leave one more."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(UserError, match="No temporary folder can be made: File too large"):
            Scratch.open()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_before_there_is_a_janitor_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*words: object, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(janitor, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Scratch.open()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_leaves_none(tmp_path: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True, env={**os.environ, TMPDIR: str(tmp_path)}
    )
    assert driver.stdout is not None
    folder = Path(driver.stdout.readline().strip())
    assert folder.parent == tmp_path and folder.exists()
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    end = time.monotonic() + 10
    while list(tmp_path.iterdir()):
        assert time.monotonic() < end
        time.sleep(0.05)
