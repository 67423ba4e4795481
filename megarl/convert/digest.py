"""A line for each tensor (shape, dtype, bytes, hash), and the differences between two lists of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Digest:
    """One tensor. hash: SHA-256 of its bytes in row-major order."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    hash: str


@dataclass(frozen=True)
class Difference:
    """One tensor that is not what it was; the field that differs, and both values, for people."""

    name: str
    what: str
    before: str
    after: str


def digest(tensor: Tensor) -> Digest:
    """Of a tensor on any device; a copy of it is made where it is not contiguous in host memory."""
    content = tensor.detach().cpu().contiguous()
    raw = content.reshape(-1).view(torch.uint8).numpy()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Digest(tuple(tensor.shape), dtype, content.nbytes, hashlib.sha256(raw.data).hexdigest())


def digests(tensors: Iterable[tuple[str, Tensor]], tell: Callable[[int], None]) -> dict[str, Digest]:
    """Of many, as they come. tell: called with the bytes done."""
    found, done = {}, 0
    for name, tensor in tensors:
        found[name] = digest(tensor)
        done += found[name].bytes
        tell(done)
    return found


def differences(before: Mapping[str, Digest], after: Mapping[str, Digest]) -> list[Difference]:
    """What changed, in the order of the names; empty where nothing did."""
    found = []
    for name in sorted({*before, *after}):
        if name not in after or name not in before:
            found.append(Difference(name, "tensor", _presence(name in before), _presence(name in after)))
            continue
        for what in ("shape", "dtype", "bytes", "hash"):
            old, new = getattr(before[name], what), getattr(after[name], what)
            if old != new:
                found.append(Difference(name, what, str(old), str(new)))
                break
    return found


def _presence(is_there: bool) -> str:
    return "present" if is_there else "missing"
