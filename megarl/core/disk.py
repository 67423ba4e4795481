"""Getting files onto the disk for good, before a rename says that they are whole."""

from __future__ import annotations

import os
from pathlib import Path


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
