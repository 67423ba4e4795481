"""Folders whose names say which process they are of, so that what a killed one leaves behind can be told, and removed."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

from megarl.core.process_state import started_at


def owner() -> str:
    """The end of such a name: behind a prefix, and a word without dashes that makes it the only one."""
    pid = os.getpid()
    return f"-{pid}-{started_at(pid)}-{socket.gethostname()}"


def remove_orphans(folder: Path, prefix: str) -> None:
    """Remove those folders with this prefix whose process was of this host, and is no more."""
    for path in folder.glob(f"{prefix}*-*-*-*"):
        _, pid, started, host = path.name.removeprefix(prefix).split("-", 3)
        if not (pid.isdecimal() and started.isdecimal()):
            continue  # somebody else's, who calls it the same
        if host == socket.gethostname() and started_at(int(pid)) != int(started):
            shutil.rmtree(path, ignore_errors=True)
