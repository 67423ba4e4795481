"""Getting files onto the disk for good, before a rename says that they are whole; and whether one can be written at all."""

from __future__ import annotations

import os
from pathlib import Path

from megarl.core.errors import UserError


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Wait until everything below a folder, and the folder itself, is on the disk."""
    for path in sorted(folder.rglob("*")):
        sync(path)
    sync(folder)


def check_writable(path: Path, option: str) -> None:
    """Raises UserError, before any work is done, where a command's result cannot be written. option: that names the file."""
    there = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise UserError(
            f"{option} {path} cannot be written ({error.strerror}). Name a file in a folder that is there."
        ) from None
    if not there:
        path.unlink()
