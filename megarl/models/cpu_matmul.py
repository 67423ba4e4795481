"""Products of float32 matrices by oneDNN on AMD's CPUs with AVX-512, where MKL, torch's own choice, stays at AVX2.

About twice as fast there for as many rows as a micro-batch or a decoded batch has. It is float32 as before: only the order
of summation differs, as between any two of MKL's kernels. Put in the place of torch's `mm` and `addmm` by `torch.library`, in
processes of ranks and servers alone. The choice is made by the kind of CPU, never by timing: two runs compute alike.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

LEAST_WORK = 2**20  # multiplications; a smaller product takes oneDNN's dispatch longer than MKL's kernel
LEAST_ROWS = 4
# More than the products of a layer, so that each is made once for all layers of a micro-batch; micro-batches are of nearly
# all numbers of rows, so that more would hardly be found again.
KERNELS_OF_A_RANK = 32
# The products of a layer for about fifty numbers of rows: batches that are decoded shrink row by row, and come again.
KERNELS_OF_A_SERVER = 256
CPU_FACTS = Path("/proc/cpuinfo")


def prefers_onednn(facts: str) -> bool:
    """Whether /proc/cpuinfo, `facts`, describes a CPU on which MKL does not take the widest vectors."""
    lines = dict(line.split(":", 1) for line in reversed(facts.splitlines()) if ":" in line)
    fields = {name.strip(): value.strip() for name, value in lines.items()}
    return fields.get("vendor_id") == "AuthenticAMD" and "avx512f" in fields.get("flags", "").split()


def mm(rows: Tensor, weight: Tensor) -> Tensor:
    """rows: [M, K], weight: [K, N] -> [M, N]."""
    if not _suits(rows, weight):
        return torch.mm(rows, weight, out=rows.new_empty(rows.shape[0], weight.shape[1]))
    return _product(rows, weight, None)


def addmm(bias: Tensor, rows: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * bias + alpha * rows @ weight."""
    if not _suits(rows, weight) or bias.dtype != torch.float32:
        output = rows.new_empty(rows.shape[0], weight.shape[1])
        return torch.addmm(bias, rows, weight, beta=beta, alpha=alpha, out=output)
    if beta == 1 and alpha == 1 and bias.dim() == 1 and bias.shape[0] == weight.shape[1] and bias.is_contiguous():
        return _product(rows, weight, bias)
    product = _product(rows, weight, None)
    if alpha != 1:
        product.mul_(alpha)
    # As in torch, what is multiplied by 0 is not read: it may be NaN.
    return product if beta == 0 else product.add_(bias, alpha=beta)


def _suits(rows: Tensor, weight: Tensor) -> bool:
    if rows.dtype != torch.float32 or weight.dtype != torch.float32 or rows.shape[0] < LEAST_ROWS:
        return False
    return rows.shape[0] * rows.shape[1] * weight.shape[1] >= LEAST_WORK


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    (m, k), n = rows.shape, weight.shape[1]
    # oneDNN is handed the first factor in rows alone. A weight's gradient has it in columns, as long as the micro-batch:
    # where that is the smaller copy, the other factor is laid out anew, and the product itself.
    if bias is None and not rows.is_contiguous() and n * (k + m) < m * k:
        return _linear(weight.t().contiguous(), rows, None).t().contiguous()
    return _linear(_dense(rows), weight.t(), bias)


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rows: [M, K], weight: [N, K] -> [M, N]."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, _dense(weight), bias, "none", [], "")
    return product


def _dense(matrix: Tensor) -> Tensor:
    """In rows or in columns without gaps: oneDNN reads both where they lie."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


def keep_few_kernels(count: int) -> None:
    """Let oneDNN keep `count` of the kernels that it makes, one for each number of rows. Call it before the first product.

    A kernel takes half a millisecond to make and half a megabyte to keep, and lies between tensors that were freed around it: by
    oneDNN's own 1,024, the heap of a rank grew from 0.4 to 1.6 GB within 50 steps of a model of 1.6M parameters.
    """
    # What is kept by oneDNN itself, and by ideep, through which torch calls it.
    for capacity in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(capacity, str(count))


@cache
def install() -> torch.library.Library | None:
    """Put these in the place of torch's own in this process, where the CPU asks for it; they end with what is returned."""
    if not CPU_FACTS.exists() or not prefers_onednn(CPU_FACTS.read_text()) or not torch.backends.mkldnn.is_available():
        return None
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that they are overridden
        library.impl("mm", mm, "CPU", allow_override=True)
        library.impl("addmm", addmm, "CPU", allow_override=True)
    return library
