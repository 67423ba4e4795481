"""Hashes of tensors as SGLang 0.5.21 computes them (managers/mm_utils.py: tensor_hash), from bytes that come in parts.

sha256: of the bytes, the first 64 bits; a server on CPUs. tiles: of a server on CUDA, whose kernel mixes each word of 32
bits with its place, sums over tiles, and mixes again (kernels/ops/memory/gpu_tensor_hash.py). Both were compared with
SGLang's own code, the kernel under Triton's interpreter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from megarl.core.platform import TensorHash

PIECE_BYTES = 2**26  # of a copy
TILE_WORDS = 8192
TILE_BYTES = 4 * TILE_WORDS
TILES_AT_ONCE = 64  # the numbers in between take 8 bytes a word, several times
LOW32, LOW64 = 2**32 - 1, 2**64 - 1
SEEDS = (0x243F6A88, ((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & LOW32)
PLACES = (0x27D4EB2D, 0x165667B1)
TURNS = (15, 13)


class Hash(Protocol):
    """A hash that is fed a tensor's bytes in their order."""

    def update(self, flat: Tensor) -> None:
        """More bytes. flat: [bytes] uint8, contiguous."""
        ...

    def hexdigest(self) -> str:
        """The hash of all that came: 16 digits."""
        ...


def make_hash(name: TensorHash) -> Hash:
    """A new hash."""
    return Sha256() if name == "sha256" else Tiles()


class Sha256:
    """The first 64 bits of SHA-256."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, flat: Tensor) -> None:
        """As the interface says."""
        for piece in flat.split(PIECE_BYTES):
            # A copy: numpy would hold on to storage that a role frees when it is offloaded.
            self._hash.update(piece.cpu().clone().numpy().data)

    def hexdigest(self) -> str:
        """As the interface says."""
        return self._hash.digest()[:8].hex()


class Tiles:
    """Sums over tiles of mixed words. What is computed stays on the device that the bytes come from."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._tiles = self._num_bytes = 0
        self._sums: list[Tensor] = []  # [2, tiles] each

    def update(self, flat: Tensor) -> None:
        """As the interface says."""
        self._num_bytes += flat.numel()
        if self._rest.numel():
            flat = torch.cat([self._rest.to(flat.device), flat])
        whole = flat.numel() // TILE_BYTES
        for start in range(0, whole, TILES_AT_ONCE):
            count = min(TILES_AT_ONCE, whole - start)
            self._add(flat[start * TILE_BYTES : (start + count) * TILE_BYTES], count)
        self._rest = flat[whole * TILE_BYTES :].clone()

    def hexdigest(self) -> str:
        """As the interface says."""
        if not self._num_bytes:
            return f"{0:016x}"
        padding = -self._num_bytes % 4
        words = (self._num_bytes + padding) // 4
        if self._rest.numel():
            self._add(torch.cat([self._rest, self._rest.new_zeros(padding)]), 1)
            self._rest = self._rest[:0]
        sums = torch.cat(self._sums, 1).cpu()
        high, low = _mixed(sums ^ (4 * words & LOW32)).tolist()
        return f"{_finished(sum((h << 32) | v for h, v in zip(high, low, strict=True))):016x}"

    def _add(self, flat: Tensor, tiles: int) -> None:
        words = _words(flat)
        at = torch.arange(words.numel(), device=flat.device) + self._tiles * TILE_WORDS & LOW32
        parts = [
            _mixed(words ^ ((at * place + seed & LOW32) ^ _turned(at, turn))).view(tiles, -1).sum(1) & LOW32
            for seed, place, turn in zip(SEEDS, PLACES, TURNS, strict=True)
        ]
        self._sums.append(torch.stack(parts))
        self._tiles += tiles


def _words(flat: Tensor) -> Tensor:
    """Bytes as words of 32 bits without a sign, in 64 bits each."""
    # Bytes of a view may begin anywhere, and words may not.
    aligned = flat if flat.storage_offset() % 4 == 0 else flat.clone()
    return aligned.view(torch.int32).to(torch.int64) & LOW32


def _turned(words: Tensor, bits: int) -> Tensor:
    return (words << bits | words >> (32 - bits)) & LOW32


def _mixed(words: Tensor) -> Tensor:
    """MurmurHash3's last step for 32 bits."""
    words = (words ^ words >> 16) * 0x85EBCA6B & LOW32
    words = (words ^ words >> 13) * 0xC2B2AE35 & LOW32
    return words ^ words >> 16


def _finished(number: int) -> int:
    """SplitMix64's last step."""
    number &= LOW64
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & LOW64
    number = (number ^ number >> 27) * 0x94D049BB133111EB & LOW64
    return number ^ number >> 31


def flat_bytes(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor's bytes in order, some rows at a time where they do not lie end to end. [bytes] uint8 each."""
    rows = [tensor] if tensor.is_contiguous() else tensor.split(max(1, 2**24 // max(1, tensor[0].nbytes)))
    for part in rows:
        yield part.contiguous().reshape(-1).view(torch.uint8)
