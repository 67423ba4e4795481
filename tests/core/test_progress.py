"""Progress of another process: written at most twice a second, read whole, gone at the end."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megarl.core.progress import WRITE_EVERY_S, Done, Progress, read_progress


def test_what_is_written_is_read_and_is_gone_at_the_end(tmp_path: Path) -> None:
    now = [0.0]
    path = tmp_path / "rank.progress"
    progress = Progress(path, lambda: now[0])
    assert read_progress(path) is None
    with progress.of(2000, "samples"):
        assert read_progress(path) == Done(0, 2000, "samples")
        progress.advance(3)
        assert read_progress(path) == Done(0, 2000, "samples")  # not every sample costs a write
        now[0] += WRITE_EVERY_S
        progress.advance()
        assert str(read_progress(path)) == "4 of 2,000 samples"
    assert read_progress(path) is None


def test_what_is_done_between_two_operations_is_of_none(tmp_path: Path) -> None:
    """Samples for later steps go on coming while the driver waits for something else."""
    path = tmp_path / "coordinator.progress"
    progress = Progress(path)
    with progress.of(64, "samples"):
        progress.advance(64)
    progress._written -= WRITE_EVERY_S
    progress.advance(6)
    assert read_progress(path) is None


def test_half_a_line_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rank.progress"
    path.write_text("12 ")
    assert read_progress(path) is None


def test_what_cannot_be_written_or_read_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's update ended with its disk full, and the driver with a file that another machine had just removed."""
    full = tmp_path / "rank.progress"
    full.symlink_to("/dev/full")
    progress = Progress(full)
    with progress.of(3, "samples"):
        progress.advance()

    def stale(path: Path) -> str:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    with monkeypatch.context() as patch:  # no longer: what counts the tests' seconds reads files too
        patch.setattr(Path, "read_text", stale)
        assert read_progress(full) is None


def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    with Progress(None).of(3, "samples"):
        assert list(tmp_path.iterdir()) == []
