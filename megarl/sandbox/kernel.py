"""The few system calls that Python 3.11 has no name for. Each raises OSError."""

from __future__ import annotations

import ctypes
import os
import signal

CLONE_NEWNS = 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

LIBC = ctypes.CDLL(None, use_errno=True)


def own_mounts() -> None:
    """From now on, what this process mounts is seen by itself and its children alone, and ends with them."""
    _checked(LIBC.unshare(CLONE_NEWNS), "unshare")
    _checked(LIBC.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "mount")


def mount_memory(folder: str) -> None:
    """An empty file system in memory over a folder."""
    _checked(LIBC.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, b"size=1m,mode=755"), f"mount {folder}")


def mount_again(source: str, place: str) -> None:
    """A folder or file at another place as well."""
    _checked(LIBC.mount(os.fsencode(source), os.fsencode(place), None, MS_BIND | MS_REC, None), f"mount {place}")


def adopt_orphans() -> None:
    """Processes below this one that lose their parent become its children, and it can wait for them."""
    _checked(LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def die_with_parent() -> None:
    """The kernel ends this process when its parent ends. To be asked for after a change of user, which forgets it."""
    _checked(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def _checked(outcome: int, what: str) -> None:
    if outcome != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
