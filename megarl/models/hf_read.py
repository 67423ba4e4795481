"""Slices of HF's tensors, from mapped files straight into the memory of the parameters that they are for.

A tensor is copied a few MiB at a time, and the pages that were read are let go: beside its parameters a rank holds one
such block of each tensor that it reads at the time, whatever the file's size.
"""

from __future__ import annotations

import mmap
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from megarl.models.hf_files import TensorInfo

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Small enough to stay in a core's cache between the copy and the check, large enough to hide the calls.
BLOCK_BYTES = 4 * 2**20


class HfReader(AbstractContextManager["HfReader"]):
    """Reads tensors of an index, also of several threads at once; its files are mapped until the block ends.

    check_finite: look for NaN and infinite values in what is read; `not_finite` then holds their tensors' names.
    """

    def __init__(self, index: dict[str, TensorInfo], *, check_finite: bool) -> None:
        self._index, self._check_finite = index, check_finite
        self._maps = {path: _mapped(path) for path in {info.file for info in index.values()}}
        self.not_finite: list[str] = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._maps.clear()

    def read(self, name: str, rows: slice, columns: slice | None, target: Tensor) -> None:
        """Copy these rows and columns of a tensor into `target`, of that shape, cast to its dtype."""
        info = self._index[name]
        stored, mapped = self._stored(info), self._maps[info.file]
        row_bytes = stored[0].nbytes if stored.dim() > 1 else stored.itemsize
        step = max(1, BLOCK_BYTES // row_bytes)
        sums = []
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            block = target[start - rows.start : stop - rows.start]
            block.copy_(stored[start:stop] if columns is None else stored[start:stop, columns])
            if self._check_finite:
                sums.append(block.sum())
            first = (info.offset + start * row_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            mapped.madvise(mmap.MADV_DONTNEED, first, info.offset + stop * row_bytes - first)
        # A sum may overflow where all values are finite, so it only says where to look closer.
        if sums and not torch.stack(sums).isfinite().all() and not target.isfinite().all():
            self.not_finite.append(name)

    def _stored(self, info: TensorInfo) -> Tensor:
        """The whole tensor as it lies in the mapped file."""
        count = torch.Size(info.shape).numel()
        flat = torch.frombuffer(self._maps[info.file], dtype=DTYPES[info.dtype], count=count, offset=info.offset)
        return flat.view(info.shape)


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        # Writable, though nobody writes: torch warns of memory that is not.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
