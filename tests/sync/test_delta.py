"""What changed in a tensor, there and back: every bit, whatever the bits are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.sync import delta
from megarl.sync.delta import DamagedDeltaError, decode, encode


@st.composite
def pairs(draw: st.DrawFn) -> tuple[delta.Bytes, delta.Bytes, int]:
    """New and old bytes of a tensor, unrelated, near each other or alike, and the bytes of an element."""
    width, count = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(0, 40))
    base = np.frombuffer(draw(st.binary(min_size=width * count, max_size=width * count)), np.uint8)
    if draw(st.booleans()):
        return np.frombuffer(draw(st.binary(min_size=width * count, max_size=width * count)), np.uint8), base, width
    steps = draw(st.lists(st.integers(-3, 3), min_size=count, max_size=count))
    new = base.view(f"u{width}") + np.array(steps, np.int64).astype(f"u{width}")
    return new.view(np.uint8), base, width


@given(pairs())
def test_what_is_put_together_is_the_new_to_the_bit(pair: tuple[delta.Bytes, delta.Bytes, int]) -> None:
    new, base, width = pair
    payload = np.frombuffer(encode(new, base, width), np.uint8)
    assert decode(payload, base, width).tobytes() == new.tobytes()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_more_than_one_piece(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "PIECE_BYTES", 64)
    random = np.random.default_rng(width)
    base, new = (random.integers(0, 256, 64 * 5 + 8 * width, dtype=np.uint8) for _ in range(2))
    payload = np.frombuffer(encode(new, base, width), np.uint8)
    assert decode(payload, base, width).tobytes() == new.tobytes()
    for damaged in (payload[:-1], payload[: len(payload) // 2], np.append(payload, np.uint8(0)), payload[:0]):
        with pytest.raises(DamagedDeltaError):
            decode(damaged, base, width)


@given(st.binary(max_size=64))
def test_what_is_no_difference_is_refused(content: bytes) -> None:
    base = np.zeros(1000, np.uint8)
    with pytest.raises(DamagedDeltaError):
        decode(np.frombuffer(content, np.uint8), base, 2)


def test_small_steps_take_few_bytes() -> None:
    """What an optimizer does to bfloat16: one weight of 50 moves to a neighbour."""
    random = np.random.default_rng(0)
    base = (random.standard_normal(100_000).astype(np.float32) * 0.02).view(np.uint32) >> 16
    new = base + (random.random(base.size) < 0.02)
    old_bytes, new_bytes = (each.astype(np.uint16).view(np.uint8) for each in (base, new))
    assert len(encode(new_bytes, old_bytes, 2)) < 0.03 * new_bytes.size
    assert len(encode(old_bytes, old_bytes, 2)) < 100
