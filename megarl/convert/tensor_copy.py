"""Copies tensors between safetensors files byte by byte, under other names or in the place of others. Without torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from megarl.core.errors import UserError
from megarl.models.hf_files import TensorInfo, content_bytes
from megarl.models.hf_header import PREFIX_BYTES, read_header

PIECE_BYTES = 8 * 2**20

Wrote = Callable[[int], object]  # told how many bytes more


def write_tensors(path: Path, tensors: Mapping[str, TensorInfo], wrote: Wrote) -> None:
    """A new file of these tensors, in their order. Raises UserError where a source cannot be read whole."""
    entries, offset = {}, 0
    for name, info in tensors.items():
        end = offset + content_bytes(info)
        entries[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    room = -(-len(text) // 8) * 8
    # Unbuffered, so that a disk that is full says so while it is written to, and not as the file is closed.
    with FileIO(path, "wb") as out:
        _write(out, struct.pack("<Q", room) + text.ljust(room))
        for info in tensors.values():
            with info.file.open("rb") as source:
                _copy(source, info.offset, content_bytes(info), out, wrote)


def write_replaced(source: Path, path: Path, replaced: Mapping[str, Sequence[TensorInfo]], wrote: Wrote) -> None:
    """A copy of a file, with the content of some tensors that of others of the same dtype, one below the other.

    Raises UserError where a file cannot be read whole.
    """
    stored = read_header(source)
    with source.open("rb") as ours, FileIO(path, "wb") as out:
        header = PREFIX_BYTES + struct.unpack("<Q", ours.read(PREFIX_BYTES))[0]
        _copy(ours, 0, header, out, wrote)
        for tensor in stored:
            parts = replaced.get(tensor.name)
            if parts is None:
                _copy(ours, tensor.offset, tensor.num_bytes, out, wrote)
                continue
            assert sum(map(content_bytes, parts)) == tensor.num_bytes, (tensor, parts)
            for part in parts:
                with part.file.open("rb") as other:
                    _copy(other, part.offset, content_bytes(part), out, wrote)


def _copy(source: BinaryIO, offset: int, num_bytes: int, out: FileIO, wrote: Wrote) -> None:
    source.seek(offset)
    while num_bytes > 0:
        try:
            piece = source.read(min(num_bytes, PIECE_BYTES))
        except OSError as error:  # which does not say of what
            raise UserError(f"{source.name} cannot be read ({error.strerror}). Copy or export it again.") from error
        if not piece:
            raise UserError(f"{source.name} ends early: it was changed while it was read. Copy or export it again.")
        _write(out, piece)
        num_bytes -= len(piece)
        wrote(len(piece))


def _write(out: FileIO, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[out.write(view) :]
