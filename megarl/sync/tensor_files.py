"""Writes and reads safetensors files as bytes: for those who move tensors and never compute with them. Without torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from io import FileIO
from pathlib import Path

import numpy as np

from megarl.core.disk import write_all
from megarl.models.hf_header import BITS, Stored, header_bytes, read_header
from megarl.sync.delta import Bytes

Named = tuple[str, str, tuple[int, ...]]  # a tensor's name, dtype as safetensors writes it, and shape
Mark = list[int]  # of a file: bytes, and time of its last change; some disks change its inode by themselves


def mark(path: Path) -> Mark:
    """Whoever writes into a file changes it; a link to it has the same. Raises OSError."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def size_of(named: Named) -> int:
    """Bytes of a tensor's content."""
    return math.prod(named[2]) * BITS[named[1]] // 8


def write_file(path: Path, tensors: Sequence[Named], contents: Iterable[Bytes], *, lasting: bool) -> int:
    """Write a file in one go; its bytes. contents: of each tensor, in order. lasting: wait until they are on the disk."""
    header, offset = {}, 0
    for each in tensors:
        name, dtype, shape = each
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size_of(each)]}
        offset += size_of(each)
    with FileIO(path, "wb") as file:
        write_all(file, header_bytes(header))
        for each, content in zip(tensors, contents, strict=True):
            assert content.size == size_of(each), (each, content.size)
            write_all(file, content.data)
        if lasting:
            os.fsync(file.fileno())
        return file.tell()


class TensorFile:
    """A file to read tensors from, by name. Not mapped: one that another machine cuts off is an error, and ends nobody.

    Raises UserError for what is no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stored: dict[str, Stored] = {each.name: each for each in read_header(path)}

    @property
    def tensors(self) -> list[Named]:
        """What is in it, in its order."""
        return [(each.name, each.dtype, each.shape) for each in self._stored.values()]

    def read(self, name: str) -> Bytes:
        """A tensor's content: [bytes] uint8. Raises OSError, also where the file has become shorter."""
        stored = self._stored[name]
        content = np.fromfile(self.path, np.uint8, stored.num_bytes, offset=stored.offset)
        if content.size != stored.num_bytes:
            raise OSError(f"{self.path} ends within {name}")
        return content
