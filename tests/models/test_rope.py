"""Frequencies against transformers' own, and against hand-computed ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megarl.models.config import Rope
from megarl.models.rope import attention_factor, inverse_frequencies, magnitude

thetas = st.floats(2.0, 1e7)
dims = st.integers(1, 64).map(lambda half: 2 * half)
factors = st.floats(1.0, 64.0)
positions = st.integers(8, 1 << 18)


def theirs(dim: int, **parameters: Any) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(head_dim=dim, max_position_embeddings=1 << 20, rope_parameters=parameters)
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    return frequencies, float(factor)


def test_plain_frequencies_by_hand() -> None:
    expected = torch.tensor([1.0, 100.0**-0.25, 0.1, 100.0**-0.75])
    torch.testing.assert_close(inverse_frequencies(Rope(100.0), 8), expected)
    assert attention_factor(Rope(100.0)) == 1.0


@given(thetas, dims, factors)
def test_linear(theta: float, dim: int, factor: float) -> None:
    expected, _ = theirs(dim, rope_type="linear", rope_theta=theta, factor=factor)
    rope = Rope(theta, "linear", factor=factor)
    torch.testing.assert_close(inverse_frequencies(rope, dim), expected)
    assert attention_factor(rope) == 1.0


@given(thetas, dims, factors, positions, st.floats(0.5, 2.0), st.floats(2.5, 8.0))
def test_llama3(theta: float, dim: int, factor: float, original: int, low: float, high: float) -> None:
    expected, _ = theirs(
        dim,
        rope_type="llama3",
        rope_theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )
    rope = Rope(theta, "llama3", factor=factor, original_positions=original, low_freq_factor=low, high_freq_factor=high)
    torch.testing.assert_close(inverse_frequencies(rope, dim), expected)


@given(thetas, dims, factors, positions, st.booleans(), st.floats(8.0, 64.0), st.floats(0.5, 4.0))
def test_yarn(theta: float, dim: int, factor: float, original: int, truncate: bool, fast: float, slow: float) -> None:
    expected, scale = theirs(
        dim,
        rope_type="yarn",
        rope_theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
    )
    rope = Rope(
        theta,
        "yarn",
        factor=factor,
        original_positions=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
    )
    torch.testing.assert_close(inverse_frequencies(rope, dim), expected)
    assert math.isclose(attention_factor(rope), scale)


@pytest.mark.parametrize(
    "given_values",
    [{}, {"attention_factor": 1.3}, {"mscale": 0.7, "mscale_all_dim": 1.2}, {"mscale": 1.0}, {"mscale_all_dim": 0.0}],
)
def test_the_factor_of_attention_under_yarn(given_values: dict[str, float]) -> None:
    _, expected = theirs(
        16,
        rope_type="yarn",
        rope_theta=1e4,
        factor=4.0,
        original_max_position_embeddings=1024,
        **given_values,
    )
    rope = Rope(1e4, "yarn", factor=4.0, original_positions=1024, **given_values)
    assert math.isclose(attention_factor(rope), expected)


def test_magnitude_by_hand() -> None:
    assert magnitude(0.5) == magnitude(1.0) == 1.0
    assert magnitude(math.e) == pytest.approx(1.1)
    assert magnitude(math.e**2, 0.5) == pytest.approx(1.1)
