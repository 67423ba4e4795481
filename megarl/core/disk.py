"""Getting files onto the disk for good, before a rename says that they are whole; and whether one can be written at all."""

from __future__ import annotations

import errno
import os
from io import BufferedIOBase, RawIOBase
from pathlib import Path

from megarl.core.errors import UserError

# What a disk that is full, a quota and a limit on file sizes answer.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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


def write_all(file: RawIOBase | BufferedIOBase, content: bytes | memoryview) -> None:
    """Write all of it: a file without a buffer may take less at once. A disk that is full says so here, and not at its end."""
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


def replace_text(path: Path, text: str, *, lasting: bool = False) -> None:
    """Write a file that is as it was or all new, whenever it is read. lasting: its content is on the disk before it is new."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    if lasting:
        sync(temporary)
    temporary.replace(path)


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
