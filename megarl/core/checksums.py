"""Sizes and checksums of files: what tells a whole folder from one that was cut short or whose bytes have changed.

CRC-32 finds accidents, not attacks. It runs without Python's lock, so that files are read side by side.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.core.errors import UserError

BLOCK_BYTES = 4 * 2**20
MAX_READERS = 16


@dataclass(frozen=True)
class FileSum:
    """What a file has to look like: its size, and the CRC-32 of its content as eight hex digits."""

    bytes: int
    crc32: str

    @classmethod
    def parse(cls, raw: Any) -> FileSum:
        """From JSON. Raises UserError for anything else."""
        try:
            return cls(int(raw["bytes"]), str(raw["crc32"]))
        except (TypeError, KeyError, ValueError) as error:
            raise UserError(f"{raw!r} is not a file's size and checksum.") from error


def sum_file(path: Path) -> FileSum:
    """Read a file once."""
    size, crc = 0, 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return FileSum(size, f"{crc:08x}")


def sum_files(folder: Path, names: list[str]) -> dict[str, FileSum]:
    """Read these files of a folder, several at once."""
    with ThreadPoolExecutor(MAX_READERS) as readers:
        return dict(zip(names, readers.map(sum_file, [folder / name for name in names]), strict=True))


def file_damage(folder: Path, sums: Mapping[str, FileSum], *, read: bool) -> list[str]:
    """What is wrong with the files of a folder, for people; empty where nothing is.

    read: also compare the content with the checksums, where the sizes are right already.
    """
    problems = []
    for name, expected in sums.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif (found := path.stat().st_size) != expected.bytes:
            problems.append(f"{name} has {found} bytes of {expected.bytes}")
    if problems or not read:
        return problems
    try:
        found_sums = sum_files(folder, list(sums))
    except FileNotFoundError as error:
        return [f"{Path(error.filename).name} was removed while it was read"]
    return [f"{name} has other content than was written" for name in sums if found_sums[name] != sums[name]]
