"""What changed in a tensor since its last version, as few bytes: lossless, whatever the bits are. Without torch.

An optimizer step moves a weight by little: as integers, old and new bit patterns differ in their low bits, or not at all.
So what travels is the difference of the patterns, small in either direction (zigzag), with the first bytes of all elements
together, then the second ones (planes), compressed. docs/weight_sync.md has what that saves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

# Elements that go through at once: the temporaries are a few times as large, and stay small beside a bucket.
PIECE_BYTES = 8 * 2**20
LEVEL = 1  # higher ones take two or three times as long, for a few percent
LENGTH_BYTES = 4  # of a compressed piece, before it


class DamagedDeltaError(ValueError):
    """What is no difference that `encode` made, or one to something of another size."""


def encode(new: Bytes, base: Bytes, width: int) -> bytes:
    """The bytes by which `decode` makes `new` of `base`. Both: [bytes] uint8. width: bytes of an element, 1 to 8."""
    assert new.size == base.size and new.size % width == 0, (new.size, base.size, width)
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
    found = []
    for start in range(0, new.size, PIECE_BYTES):
        piece = slice(start, start + PIECE_BYTES)
        planes = _planes(_zigzag(new[piece], base[piece], width), width)
        packed = compressor.compress(planes.data)
        found += [len(packed).to_bytes(LENGTH_BYTES, "little"), packed]
    return b"".join(found)


def decode(payload: Bytes, base: Bytes, width: int) -> Bytes:
    """The new bytes: [bytes] uint8, as long as `base`. Raises DamagedDeltaError."""
    new = np.empty_like(base)
    decompressor, at = zstandard.ZstdDecompressor(), 0
    for start in range(0, base.size, PIECE_BYTES):
        piece = slice(start, min(start + PIECE_BYTES, base.size))
        length = int.from_bytes(payload[at : at + LENGTH_BYTES].tobytes(), "little")
        at += LENGTH_BYTES
        planes = _unpacked(decompressor, payload[at : at + length], piece.stop - piece.start)
        at += length
        new[piece] = _undone(planes, base[piece], width)
    if at != payload.size:
        raise DamagedDeltaError(f"it has {payload.size} bytes, and its pieces {at}")
    return new


def _unpacked(decompressor: zstandard.ZstdDecompressor, packed: Bytes, size: int) -> Bytes:
    try:
        # The size that the frame claims is nobody's word for how much memory to take.
        content = decompressor.decompress(packed.tobytes(), max_output_size=size)
    except zstandard.ZstdError as error:
        raise DamagedDeltaError(str(error)) from error
    if len(content) != size:
        raise DamagedDeltaError(f"a piece has {len(content)} bytes of {size}")
    return np.frombuffer(content, np.uint8)


def _zigzag(new: Bytes, base: Bytes, width: int) -> Bytes:
    """Differences of the elements as integers: 0, -1, 1, -2, ... become 0, 1, 2, 3, ..."""
    signed: Any = np.dtype(f"<i{width}")
    difference = new.view(signed) - base.view(signed)  # wraps around, and back again in `_undone`
    found: Bytes = ((difference << 1) ^ (difference >> (8 * width - 1))).view(np.uint8)
    return found


def _undone(planes: Bytes, base: Bytes, width: int) -> Bytes:
    unsigned: Any = np.dtype(f"<u{width}")
    first, *rest = planes.reshape(width, -1)
    found = first.astype(unsigned)
    for index, plane in enumerate(rest, start=1):  # faster than to transpose
        found |= plane.astype(unsigned) << unsigned.type(8 * index)
    sign = -(found & unsigned.type(1))  # all bits of those below zero
    found >>= unsigned.type(1)
    found ^= sign
    found += base.view(unsigned)
    return found.view(np.uint8)


def _planes(content: Bytes, width: int) -> Bytes:
    return np.ascontiguousarray(content.reshape(-1, width).T).reshape(-1)
