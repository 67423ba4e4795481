"""One process at a time writes into a run's folder: another that did would replace its metrics, and remove its checkpoints."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.core.errors import UserError
from megarl.core.log import get_logger

LOCK = ".lock"
# Of file systems that have no locks.
WITHOUT = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)

log = get_logger(__name__)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within the block, no other process gets the run's folder, which is there. Raises UserError where another has it.

    The lock goes with the process that has it, however that ends.
    """
    with (folder / LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"{folder} is in use: {file.read().strip() or 'another process'} writes this run. Wait until it has ended, end "
                "it, or choose another folder by run.name=... or run.dir=... (of `megarl replay` by --out)."
            ) from None
        except OSError as error:
            if error.errno not in WITHOUT:
                raise
            log.warning("%s is on a file system without locks: see to it that no other process writes this run", folder)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def check_unlocked(folder: Path) -> None:
    """Raises UserError where another process has the run's folder."""
    if (folder / LOCK).exists():
        with locked(folder):
            return
