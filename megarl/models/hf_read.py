"""Slices of HF's tensors, from mapped files straight into the memory of the parameters that they are for.

FP8 and MXFP4 tensors become what they stand for on the way: value * scale of its block, see `hf_fp8` and `hf_mxfp4`. A
tensor is copied a few MiB at a time, and the pages that were read are let go: beside its parameters a rank holds one such
block a reader, whatever the file's size.
"""

from __future__ import annotations

import mmap
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from megarl.models.hf_files import TensorInfo
from megarl.models.hf_fp8 import FP8
from megarl.models.hf_mxfp4 import EXPONENT_BIAS, STORED, VALUES
from megarl.models.rules import Slot

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
STORED_DTYPES = {**DTYPES, FP8: torch.float8_e4m3fn, STORED: torch.uint8}
# Small enough to stay in a core's cache between the copy and the check, large enough to hide the calls.
BLOCK_BYTES = 4 * 2**20
# Blocks at once: files are waited for, and new memory is taken, side by side.
NUM_READERS = 4


class HfReader(AbstractContextManager["HfReader"]):
    """Reads tensors of an index, several blocks at once; its files are mapped until the block of code ends.

    check_finite: look for NaN and infinite values in what is read.
    """

    def __init__(self, index: dict[str, TensorInfo], *, check_finite: bool) -> None:
        self._index, self._check_finite = index, check_finite
        self._maps = {path: _mapped(path) for path in {info.file for info in index.values()}}
        self._pool = ThreadPoolExecutor(NUM_READERS)
        self._pending: list[tuple[str, Future[bool]]] = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._maps.clear()

    def read(self, name: str, rows: slice, columns: slice | None, target: Tensor) -> None:
        """Begin to copy these rows and columns of a tensor into `target`, of that shape, cast to its dtype.

        rows: a tensor of three dimensions is a matrix of all its rows, as of all experts. What is in `target`
        counts when `finish` has returned.
        """
        info = self._index[name]
        if not info.shape:
            info = replace(info, shape=(1,))
        if len(info.shape) == 3:
            info = replace(info, shape=(info.shape[0] * info.shape[1], info.shape[2]))
            target = target.flatten(0, -2)  # of a convolution it has three dimensions as well
        width = torch.Size(info.shape[1:]).numel()
        # What has scales passes through float32.
        itemsize = STORED_DTYPES[info.dtype].itemsize if info.scales is None else torch.float32.itemsize
        step = max(1, BLOCK_BYTES // (width * itemsize))
        for start in range(rows.start, rows.stop, step):
            block = slice(start, min(start + step, rows.stop))
            part = target.detach()[block.start - rows.start : block.stop - rows.start]
            self._pending.append((name, self._pool.submit(self._copy, info, block, columns, part)))

    def read_slot(self, name: str, slot: Slot, target: Tensor) -> None:
        """Begin to copy an expert's own of a tensor of all experts, as `read` does. target: [out] or [out, in].

        MXFP4 has rows of [out, in] in the file; else a matrix is [in, out] there, and is read by these rows.
        """
        info = self._index[name]
        lines = target.detach() if info.packed is not None or target.dim() == 1 else target.detach().T
        width = torch.Size(lines.shape[1:]).numel() * slot.step
        step = max(1, BLOCK_BYTES // (width * torch.float32.itemsize))
        for start in range(0, len(lines), step):
            part = lines[start : start + step]
            copy = self._copy_packed if info.packed is not None else self._copy_slot
            self._pending.append((name, self._pool.submit(copy, info, slot, start, part)))

    def finish(self) -> list[str]:
        """Wait for everything that was begun. Returns the names of tensors that have values which are not finite."""
        found = {name for name, block in self._pending if not block.result()}
        self._pending.clear()
        return sorted(found)

    def _copy(self, info: TensorInfo, rows: slice, columns: slice | None, target: Tensor) -> bool:
        """Copy one block; returns False where it was to be checked and is not finite."""
        stored = self._stored(info)
        part = stored[rows] if columns is None else stored[rows, columns]
        if info.scales is not None:
            part = dequantized(part, self._stored(info.scales.info), info.scales.block, rows, columns)
        target.copy_(part)
        self._let_go(info, rows)
        return self._passes(target)

    def _copy_slot(self, info: TensorInfo, slot: Slot, start: int, target: Tensor) -> bool:
        """Copy elements of a vector, or rows of a matrix, from `start` on; returns what `_copy` does."""
        mine = self._stored(info)[slot.expert]
        rows, taken = slice(start, start + len(target)), slice(slot.first, None, slot.step)
        target.copy_(mine[taken][rows] if mine.dim() == 1 else mine[rows, taken])
        if mine.dim() == 2:
            first = slot.expert * len(mine) + start
            self._let_go(replace(info, shape=(1, *info.shape[2:])), slice(first, first + len(target)))
        return self._passes(target)

    def _copy_packed(self, info: TensorInfo, slot: Slot, start: int, target: Tensor) -> bool:
        """Copy rows of an MXFP4 matrix from `start` on; returns what `_copy` does."""
        assert info.packed is not None
        rows = slice(slot.first + start * slot.step, slot.first + (start + len(target)) * slot.step, slot.step)
        blocks, powers = (self._stored(each)[slot.expert, rows] for each in (info.packed.blocks, info.packed.scales))
        target.copy_(unpacked(blocks, powers))
        _, out, *rest = info.packed.blocks.shape
        at = slice(slot.expert * out + rows.start, slot.expert * out + min(rows.stop, out))
        self._let_go(replace(info.packed.blocks, shape=(1, *rest)), at)
        return self._passes(target)

    def _let_go(self, info: TensorInfo, rows: slice) -> None:
        """Give back the pages that these rows of a tensor are in, which have been read."""
        if info.columns is not None:  # they are in all of its matrix's
            info, rows = replace(info, shape=(info.shape[1], info.columns.width)), slice(0, info.shape[1])
        row_bytes = torch.Size(info.shape[1:]).numel() * STORED_DTYPES[info.dtype].itemsize
        first = (info.offset + rows.start * row_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        self._maps[info.file].madvise(mmap.MADV_DONTNEED, first, info.offset + rows.stop * row_bytes - first)

    def _passes(self, target: Tensor) -> bool:
        """Whether what was read is finite, or nobody asked."""
        # A sum may overflow where all values are finite, so it only says where to look closer.
        return not self._check_finite or bool(target.sum().isfinite()) or bool(target.isfinite().all())

    def _stored(self, info: TensorInfo) -> Tensor:
        """The whole tensor as it lies in the mapped file; of one with rows and columns exchanged a view."""
        exchanged = info.columns
        shape = info.shape if exchanged is None else (info.shape[1], exchanged.width)
        count, dtype = torch.Size(shape).numel(), STORED_DTYPES[info.dtype]
        flat = torch.frombuffer(self._maps[info.file], dtype=dtype, count=count, offset=info.offset).view(shape)
        return flat if exchanged is None else flat[:, exchanged.first : exchanged.first + info.shape[0]].T


def dequantized(values: Tensor, scales: Tensor, block: tuple[int, int], rows: slice, columns: slice | None) -> Tensor:
    """[rows, columns] float32: each value times the scale of its block.

    values: these rows and columns (None: all) of a matrix, FP8. scales: of all of the matrix's blocks, [rows / block rows,
    columns / block columns], rounded up.
    """
    first = 0 if columns is None else columns.start
    down = torch.arange(rows.start, rows.stop) // block[0]
    across = torch.arange(first, first + values.shape[1]) // block[1]
    return values.float().mul_(scales.float()[down][:, across])


def unpacked(blocks: Tensor, powers: Tensor) -> Tensor:
    """[rows, in] bfloat16: MXFP4's values times their powers. blocks: [rows, in / 32, 16], powers: [rows, in / 32]; uint8."""
    values = torch.tensor(VALUES, dtype=torch.bfloat16)
    each = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    return torch.ldexp(values[each.int()], powers.int()[..., None] - EXPONENT_BIAS).flatten(1)


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        # Writable, though nobody writes: torch warns of memory that is not.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
