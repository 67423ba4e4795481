"""Copies tensors between safetensors files, under other names or in the place of others. Without torch.

Byte by byte, but for experts that lie in one tensor with rows and columns exchanged, of which a matrix is taken at a time, and
for FP8 tensors with scales, whose numbers the caller makes.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping, Sequence
from io import BufferedIOBase, FileIO, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megarl.core.disk import write_all
from megarl.core.errors import UserError
from megarl.models.hf_files import Columns, TensorInfo, content_bytes, unquantised
from megarl.models.hf_header import BITS, PREFIX_BYTES, header_bytes, read_header

PIECE_BYTES = 8 * 2**20

Wrote = Callable[[int], object]  # told how many bytes more


def write_tensors(
    path: Path,
    tensors: Mapping[str, TensorInfo],
    wrote: Wrote = lambda _: None,
    unscaled: Callable[[str], memoryview] | None = None,
) -> dict[str, dict[str, Any]]:
    """A new file of these tensors, in their order; returns what its header says of each.

    unscaled: gives what an FP8 tensor with scales stands for, in bfloat16; needed where there is one.
    Raises UserError where a source cannot be read whole.
    """
    entries, offset = dict[str, dict[str, Any]](), 0
    for name, info in tensors.items():
        written = unquantised(info)
        end = offset + content_bytes(written)
        entries[name] = {"dtype": written.dtype, "shape": list(info.shape), "data_offsets": [offset, end]}
        offset = end
    # Unbuffered, so that a disk that is full says so while it is written to, and not as the file is closed.
    with FileIO(path, "wb") as out:
        write_all(out, header_bytes(entries))
        for name, info in tensors.items():
            if info.scales is not None:
                assert unscaled is not None, name
                write_all(out, unscaled(name))
                wrote(content_bytes(unquantised(info)))
                continue
            with info.file.open("rb") as source:
                if info.columns is None:
                    _copy(source, info.offset, content_bytes(info), out, wrote)
                else:
                    write_all(out, _columns(source, info, info.columns))
                    wrote(content_bytes(info))
    return entries


def write_replaced(source: Path, path: Path, replaced: Mapping[str, Sequence[TensorInfo]], wrote: Wrote) -> None:
    """A copy of a file, with the content of some tensors that of others of the same dtype, one below the other.

    Experts are put beside each other where the tensor of all has rows and columns exchanged.
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
            if (each := _exchanged(tensor.shape, parts)) is not None:
                for first in range(0, len(parts), each):
                    write_all(out, _beside(parts[first : first + each]))
                    wrote(sum(map(content_bytes, parts[first : first + each])))
                continue
            for part in parts:
                with part.file.open("rb") as other:
                    _copy(other, part.offset, content_bytes(part), out, wrote)


def _columns(source: BinaryIO, info: TensorInfo, columns: Columns) -> bytes:
    """A tensor's content, from a matrix that has it with rows and columns exchanged."""
    rows, width = info.shape
    content = io.BytesIO()
    _copy(source, info.offset, width * columns.width * BITS[info.dtype] // 8, content, lambda _: None)
    matrix = np.frombuffer(content.getbuffer(), f"V{BITS[info.dtype] // 8}").reshape(width, columns.width)
    return matrix[:, columns.first : columns.first + rows].T.tobytes()


def _exchanged(shape: Sequence[int], parts: Sequence[TensorInfo]) -> int | None:
    """Of how many parts each matrix of a tensor of all experts is, if it has their rows and columns exchanged; else None."""
    if len(shape) != 3 or len(parts[0].shape) != 2 or len(parts) % shape[0]:
        return None
    (rows, width), each = parts[0].shape, len(parts) // shape[0]
    return each if tuple(shape[1:]) == (width, each * rows) != (each * rows, width) else None


def _beside(parts: Sequence[TensorInfo]) -> bytes:
    """The content of matrices with rows and columns exchanged, beside each other."""
    found = []
    for part in parts:
        content = io.BytesIO()
        with part.file.open("rb") as source:
            _copy(source, part.offset, content_bytes(part), content, lambda _: None)
        found.append(np.frombuffer(content.getbuffer(), f"V{BITS[part.dtype] // 8}").reshape(part.shape))
    beside: bytes = np.concatenate(found).T.tobytes()
    return beside


def _copy(source: BinaryIO, offset: int, num_bytes: int, out: RawIOBase | BufferedIOBase, wrote: Wrote) -> None:
    source.seek(offset)
    while num_bytes > 0:
        try:
            piece = source.read(min(num_bytes, PIECE_BYTES))
        except OSError as error:  # which does not say of what
            raise UserError(f"{source.name} cannot be read ({error.strerror}). Copy or export it again.") from error
        if not piece:
            raise UserError(f"{source.name} ends early: it was changed while it was read. Copy or export it again.")
        write_all(out, piece)
        num_bytes -= len(piece)
        wrote(len(piece))
