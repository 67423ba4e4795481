"""Writes and reads safetensors files as bytes: for those who move tensors and never compute with them. Without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from io import FileIO
from pathlib import Path

import numpy as np

from megarl.models.hf_header import BITS, Stored, read_header
from megarl.sync.delta import Bytes

ALIGNMENT = 8  # of the header's end
Named = tuple[str, str, tuple[int, ...]]  # a tensor's name, dtype as safetensors writes it, and shape


Mark = list[int]  # of a file: bytes, and time of its last change; some disks change its inode by themselves


def mark(path: Path) -> Mark:
    """Whoever writes into a file changes it; a link to it has the same. Raises OSError."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def size_of(named: Named) -> int:
    """Bytes of a tensor's content."""
    count = 1
    for length in named[2]:
        count *= length
    return count * BITS[named[1]] // 8


def write_file(path: Path, tensors: Sequence[Named], contents: Iterable[Bytes], *, lasting: bool) -> int:
    """Write a file in one go; its bytes. contents: of each tensor, in order. lasting: wait until they are on the disk."""
    header, offset = {}, 0
    for each in tensors:
        name, dtype, shape = each
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size_of(each)]}
        offset += size_of(each)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text = text.ljust(-(-len(text) // ALIGNMENT) * ALIGNMENT)
    with FileIO(path, "wb") as file:
        _write(file, memoryview(len(text).to_bytes(8, "little") + text))
        for each, content in zip(tensors, contents, strict=True):
            assert content.size == size_of(each), (each, content.size)
            _write(file, content.data)
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


def _write(file: FileIO, content: memoryview) -> None:
    """Write all of it: unbuffered, so that a disk that is full says so here and not when the file is closed."""
    while content:
        content = content[file.write(content) :]
