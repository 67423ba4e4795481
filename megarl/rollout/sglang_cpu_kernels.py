"""A stand-in for SGLang's compiled kernels (`sgl_kernel`) on a machine without them: names resolve, calls raise.

Only what SGLang 0.5.21 really calls with `--device cpu --attention-backend torch_native` is written out. Never imported
where the real package is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

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


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in on the CPU platform")

    missing.__name__ = name
    return missing
