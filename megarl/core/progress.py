"""How far an operation of another process is: a small file that the process writes and the driver reads while it waits.

Both see the run's folder, so this needs no messages, and works while the process computes. Not a record: the file is gone when
the operation has ended, and stays as it was where the process was killed. Where it cannot be written or read, as on a disk that
is full or over NFS just when it goes, nothing is known, and nothing fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

WRITE_EVERY_S = 0.5
SUFFIX = ".progress"  # of such files, among a run's logs


@dataclass(frozen=True)
class Done:
    """So many of `total`; unit: what is counted, in the plural."""

    count: int
    total: int
    unit: str

    def __str__(self) -> str:
        """For people."""
        return f"{self.count:,} of {self.total:,} {self.unit}"


class Progress:
    """The writing side, in the process that works. path: None writes nothing. clock: seconds that only go up."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._done = Done(0, 0, "")
        self._written = 0.0
        self._under_way = False

    @contextmanager
    def of(self, total: int, unit: str) -> Iterator[None]:
        """One operation."""
        self._done, self._under_way = Done(0, total, unit), True
        self._write()
        yield
        self._under_way = False
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def advance(self, count: int = 1) -> None:
        """So many more are done; written at most every WRITE_EVERY_S seconds. Between two operations it is of neither."""
        if not self._under_way:
            return
        self._done = Done(self._done.count + count, self._done.total, self._done.unit)
        if self._clock() - self._written >= WRITE_EVERY_S:
            self._write()

    def _write(self) -> None:
        self._written = self._clock()
        if self._path is not None:
            with suppress(OSError):
                self._path.write_text(f"{self._done.count} {self._done.total} {self._done.unit}\n")


def read_progress(path: Path) -> Done | None:
    """What was written last; None where nothing is under way, a line is half written, or it cannot be read."""
    try:
        words = path.read_text().split()
    except OSError:
        return None
    if len(words) != 3:
        return None
    return Done(int(words[0]), int(words[1]), words[2])


def forget_progress(logs: Path) -> None:
    """Remove what processes left that were killed: those of a run that begins again have done nothing yet."""
    for left in logs.glob(f"*{SUFFIX}"):
        left.unlink(missing_ok=True)
