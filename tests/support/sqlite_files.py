"""What an SQLite file says of itself."""

from __future__ import annotations

from pathlib import Path


def commits(path: Path) -> int:
    """How many transactions have changed the file: its change counter, https://www.sqlite.org/fileformat.html#file_change_counter."""
    return int.from_bytes(path.read_bytes()[24:28])
