"""Numbers into FP8, bit for bit against a loop over blocks and numbers in Python's own arithmetic."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.models.fp8_quantize import quantize
from tests.support.fp8 import e4m3, slow_reference

pytestmark = pytest.mark.usefixtures("on_device")
DTYPES = [torch.float32, torch.bfloat16]
# Every finite number of e4m3 from 0 on, and the byte that it is: bytes are in the order of numbers.
NUMBERS = [e4m3(byte) for byte in range(127)]


def nearest(quotient: float) -> int:
    """The byte of the nearest number of e4m3, ties to the even byte; beyond the largest, the largest."""
    sign, size = (0x80 if math.copysign(1.0, quotient) < 0 else 0), abs(quotient)
    best = min(range(127), key=lambda byte: (abs(NUMBERS[byte] - size), byte % 2))
    return sign | best


def slow_quantize(weight: Tensor) -> tuple[list[list[int]], list[list[float]]]:
    """Bytes, and scales; one number after the other."""
    rows, columns = weight.shape
    numbers = weight.float().tolist()
    found = [[0] * columns for _ in range(rows)]
    scales = []
    for top in range(0, rows, 128):
        line = []
        for left in range(0, columns, 128):
            block = [(r, c) for r in range(top, min(top + 128, rows)) for c in range(left, min(left + 128, columns))]
            largest = max(abs(numbers[r][c]) for r, c in block)
            scale = np.float32(1.0)
            if largest > 0:
                scale = max(np.float32(largest) / np.float32(448.0), np.float32(2.0**-126))
            for r, c in block:
                found[r][c] = nearest(float(np.float32(numbers[r][c]) / scale))
            line.append(float(scale))
        scales.append(line)
    return found, scales


def same(weight: Tensor) -> bool:
    values, scales = quantize(weight)
    assert values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
    expected, factors = slow_quantize(weight)
    return bool(values.view(torch.uint8).tolist() == expected and scales.tolist() == factors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (128, 128), (129, 127), (130, 260)])
def test_bytes_and_scales_are_those_of_the_loop(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert same(
        (torch.randn(shape, generator=torch.Generator(torch.get_default_device()).manual_seed(1)) * 0.02).to(dtype)
    )


@settings(max_examples=25)
@given(
    st.integers(1, 140),
    st.integers(1, 140),
    st.integers(-120, 120),
    st.integers(0, 2**31),
    st.sampled_from(DTYPES),
)
def test_numbers_of_every_size(rows: int, columns: int, power: int, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    # From block to block, and within each, of very different sizes.
    weight = torch.randn(rows, columns, generator=generator) * torch.exp2(
        torch.randint(-12, 1, (rows, columns), generator=generator)
    )
    assert same((weight * 2.0**power).to(dtype))


def test_every_tie_goes_to_the_even_number() -> None:
    between = [(low + high) / 2 for low, high in itertools.pairwise(NUMBERS)]
    for sign in (1, -1):
        weight = torch.tensor([[448.0, *(sign * number for number in between)]])
        assert quantize(weight)[1].tolist() == [[1.0]] and same(weight)


def test_blocks_of_zeros_stay_zeros() -> None:
    weight = torch.zeros(200, 130)
    weight[0, 129] = 1.0
    values, scales = quantize(weight)
    assert scales.tolist() == [[1.0, pytest.approx(1 / 448)], [1.0, 1.0]]
    assert values.float().count_nonzero() == 1 and values[0, 129].float() == 448


def test_numbers_beyond_what_a_scale_can_be_are_small_and_finite() -> None:
    tiny = torch.full((2, 2), 2.0**-140)
    tiny[0, 0] = 2.0**-126
    values, scales = quantize(tiny)
    assert scales.tolist() == [[2.0**-126]] and values.float().tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert same(tiny)
    largest = torch.full((1, 1), torch.finfo(torch.float32).max)
    values, scales = quantize(largest)
    assert values.float().item() == 448 and math.isfinite(values.float().item() * scales.item())


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_spoils_its_block_and_no_other(number: float, dtype: torch.dtype) -> None:
    weight = torch.ones(129, 256, dtype=dtype)
    weight[3, 200] = number
    values, scales = quantize(weight)
    back = slow_reference(values, scales, (128, 128), torch.float32)
    assert back[:128, 128:].isnan().all()
    assert back[:, :128].eq(1).all() and back[128:].eq(1).all()


def test_a_number_moves_by_a_sixteenth_at_most_or_by_a_part_of_the_blocks_largest() -> None:
    weight = torch.randn(256, 256, generator=torch.Generator(torch.get_default_device()).manual_seed(2))
    values, scales = quantize(weight)
    back = values.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    bound = torch.maximum(weight.abs() / 16, scales.repeat_interleave(128, 0).repeat_interleave(128, 1) * 2.0**-10)
    assert ((back - weight).abs() <= bound * 1.0001).all()
    assert (back - weight).abs().max() > 0
