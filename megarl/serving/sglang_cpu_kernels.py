"""A stand-in for SGLang's compiled kernels (`sgl_kernel`) on a machine without them: names resolve, calls raise.

Only what SGLang 0.5.21 really calls with `--device cpu --attention-backend torch_native` is written out. Never imported
where the real package is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__version__ = "0.0.0+megarl.standin"
# An empty search path: `import sgl_kernel.anything` fails as it does for a package without that module.
__path__: list[str] = []


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write new KV-cache slots into the rows of their requests.

    req_pool_indices, start_offset, end_offset: [B]. req_to_token: [requests, pool_len], changed in place: row
    req_pool_indices[b] receives, in columns [start_offset[b], end_offset[b]), the next entries of out_cache_loc.
    """
    taken = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count


def gate_and_add(hidden: Tensor, gate: Tensor, shared: Tensor, output: Tensor) -> None:
    """Add the shared expert's output, times the sigmoid of the token's product with the gate, to that of the others.

    hidden, shared, output: [T, hidden]; output is changed in place. gate: [hidden]. Sums in float32, as SGLang's own kernel,
    which is one of triton's (kernels/ops/elementwise: fused_gate_sigmoid_mul_add).
    """
    open_by = torch.sigmoid((hidden.float() * gate.float()).sum(-1, keepdim=True))
    output.copy_(output.float() + open_by * shared.float())


def murmur_hash32_cpu(seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """MurmurHash3 (x86, 32 bits, seed 0) of 16 bytes: seed, position and column of each number that a sampler draws.

    seeds: [B] of 64 bits. positions: [B], columns: [V], of 32 bits each. Returns [B, V] uint32. Source: Austin Appleby,
    MurmurHash3.cpp (public domain).
    """
    wide = seeds.view(torch.int64).numpy().view(np.uint64)
    state = np.zeros(len(wide), np.uint32)
    for block in (wide.astype(np.uint32), (wide >> np.uint64(32)).astype(np.uint32), _as_uint32(positions)):
        state = _mix(state, block)
    whole = _mix(state[:, None], _as_uint32(columns)[None])
    whole ^= np.uint32(16)  # the number of bytes
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        whole ^= whole >> np.uint32(shift)
        whole *= np.uint32(factor)
    whole ^= whole >> np.uint32(16)
    return torch.from_numpy(whole)


def _as_uint32(numbers: Tensor) -> NDArray[np.uint32]:
    return numbers.numpy().astype(np.uint32)


def _mix(state: NDArray[np.uint32], block: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """One round: four more bytes into the state."""
    mixed = state ^ (_rotated(block * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593))
    return _rotated(mixed, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _rotated(numbers: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    return (numbers << np.uint32(bits)) | (numbers >> np.uint32(32 - bits))


@cache
def register_operators() -> torch.library.Library:
    """Make what SGLang calls through torch known to it; that ends with the library that is returned."""
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seeds, Tensor positions, Tensor columns) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")
    return library


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in on the CPU platform")

    missing.__name__ = name
    return missing
