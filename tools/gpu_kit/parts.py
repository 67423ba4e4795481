"""A file cut into parts of a limited size, and put together again. With Python's own library alone, as all of `use`.

A part is a line of JSON (`Head`), and bytes. It says what it is a part of: no list travels with the parts, and names may change.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

HEAD_BYTES = 512  # of the line, with what it is filled up with
COPIED_BYTES = 2**20


class KitError(ValueError):
    """What a user can mend."""


@dataclass(frozen=True)
class Head:
    """kit: checksum of the whole file. number: from 0, of `count` parts. checksum: of this part's bytes."""

    kit: str
    number: int
    count: int
    checksum: str

    def line(self) -> bytes:
        """HEAD_BYTES bytes."""
        return json.dumps(asdict(self)).encode().ljust(HEAD_BYTES - 1) + b"\n"

    @classmethod
    def read(cls, part: Path) -> Head:
        """Of a part. Raises KitError for a file that is none."""
        try:
            with part.open("rb") as file:
                return cls(**json.loads(file.read(HEAD_BYTES)))
        except (OSError, ValueError, TypeError) as error:
            raise KitError(f"{part} is no part of a kit: {error}. Name the files that `make` wrote.") from error


def checksum(file: Path, skip: int = 0) -> str:
    """SHA-256 of what lies behind so many bytes."""
    found = hashlib.sha256()
    with file.open("rb") as opened:
        opened.seek(skip)
        while block := opened.read(COPIED_BYTES):
            found.update(block)
    return found.hexdigest()


def split(file: Path, folder: Path, part_bytes: int) -> list[Path]:
    """Parts of at most so many bytes, in the order of their names; `folder` is there."""
    room = part_bytes - HEAD_BYTES
    if room <= 0:
        raise KitError(f"A part has to hold more than {HEAD_BYTES} bytes; got {part_bytes}.")
    kit, count = checksum(file), max(1, -(-file.stat().st_size // room))
    parts = [folder / f"part-{number:02d}" for number in range(count)]
    with file.open("rb") as opened:
        for number, part in enumerate(parts):
            content = opened.read(room)
            part.write_bytes(Head(kit, number, count, hashlib.sha256(content).hexdigest()).line() + content)
    return parts


def found_parts(given: Iterable[Path]) -> list[Path]:
    """The files, and the files of folders that are named like parts."""
    return [part for each in given for part in (sorted(each.glob("part-*")) if each.is_dir() else [each])]


def join(given: Iterable[Path], target: Path) -> str:
    """Put the parts together, in whatever order they are given; the checksum of the whole.

    Raises KitError where a part is missing, damaged, or of another kit.
    """
    heads = {Head.read(part): part for part in found_parts(given)}
    if not heads:
        raise KitError(
            "No part of a kit was given: name the files part-00, part-01, ... or the folder that holds them."
        )
    kits, count = {head.kit for head in heads}, next(iter(heads)).count
    if len(kits) > 1:
        raise KitError(f"The parts are of {len(kits)} different kits: give those of one `make`.")
    missing = sorted(set(range(count)) - {head.number for head in heads})
    if missing:
        raise KitError(f"Of {count} parts these are missing: {', '.join(f'part-{number:02d}' for number in missing)}.")
    with target.open("wb") as whole:
        for head, part in sorted(heads.items(), key=lambda item: item[0].number):
            if checksum(part, HEAD_BYTES) != head.checksum:
                raise KitError(f"{part} is damaged: its bytes are not those that `make` wrote. Carry it over again.")
            with part.open("rb") as file:
                file.seek(HEAD_BYTES)
                while block := file.read(COPIED_BYTES):
                    whole.write(block)
        whole.flush()
        os.fsync(whole.fileno())
    [kit] = kits
    return kit
