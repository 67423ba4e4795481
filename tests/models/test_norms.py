"""Norms against their formula, and the linear that norms its output."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from megarl.models.norms import (
    LATENT_EPS,
    LatentNorm,
    NormedRowParallelLinear,
    RMSNorm,
    WholeNorm,
    _NormedOverRanks,
)
from megarl.training.parallel import Groups

pytestmark = pytest.mark.usefixtures("on_device")


def settings(
    *, sequence_parallel: bool = False, offset: bool = False, dtype: torch.dtype = torch.float64
) -> TransformerConfig:
    return SimpleNamespace(  # type: ignore[return-value]
        params_dtype=dtype, sequence_parallel=sequence_parallel, layernorm_zero_centered_gamma=offset
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("offset", [False, True])
def test_the_norm_is_its_formula_and_marks_its_weight(sequence_parallel: bool, offset: bool) -> None:
    norm = RMSNorm(settings(sequence_parallel=sequence_parallel, offset=offset), 6, eps=0.1)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(6.0))
    x = torch.randn(3, 6, dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * (torch.arange(6.0) + offset)
    torch.testing.assert_close(norm(x), expected, rtol=1e-6, atol=1e-6)
    assert norm.weight.sequence_parallel is sequence_parallel


def test_one_plus_a_small_weight_keeps_the_weight_in_bfloat16() -> None:
    ours = RMSNorm(settings(offset=True, dtype=torch.bfloat16), 64, eps=1e-6)
    theirs = Gemma3RMSNorm(64, eps=1e-6).bfloat16()
    with torch.no_grad():
        for norm in (ours, theirs):
            norm.weight.copy_(torch.linspace(-0.01, 0.01, 64))
    x = torch.randn(500, 64, generator=torch.Generator(torch.get_default_device()).manual_seed(0)).bfloat16()
    apart = ours(x) != theirs(x)
    # Two ways to the same number in float32 may round to neighbours.
    assert apart.float().mean() < 0.01
    assert ours(x).dtype == torch.bfloat16


def test_norms_of_latents_have_an_epsilon_of_their_own() -> None:
    assert LatentNorm(settings(), 4, eps=0.5).eps == LATENT_EPS


def test_a_norm_over_all_heads_is_the_formula_over_their_elements(one_rank: Groups) -> None:
    with one_rank.active():
        norm = WholeNorm(settings(sequence_parallel=True), 3, eps=0.1, heads=2)
    assert norm.weight.shape == (6,)
    # A part of the weight, whose gradient no other rank adds to.
    assert norm.weight.tensor_model_parallel and not norm.weight.sequence_parallel
    with torch.no_grad():
        norm.weight.copy_(torch.arange(6.0))
    x = torch.randn(5, 1, 2, 3, dtype=torch.float64)
    flat = x.reshape(5, 1, 6)
    expected = flat / (flat.square().mean(-1, keepdim=True) + 0.1).sqrt() * torch.arange(6.0)
    torch.testing.assert_close(norm(x), expected.view_as(x), rtol=1e-6, atol=1e-6)


def test_the_norm_over_ranks_has_the_gradients_of_torchs(one_rank: Groups) -> None:
    """By one rank; two are in test_two_ranks, and their gradients in tests/training/test_invariance."""
    x, weight, grad = torch.randn(7, 1, 6), torch.randn(6), torch.randn(7, 1, 6)
    found = []
    for norm in (
        lambda x, weight: _NormedOverRanks.apply(x, weight, 0.1, one_rank.tp),
        lambda x, weight: torch.nn.functional.rms_norm(x, (6,), weight, 0.1),
    ):
        given = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        output = norm(*given)
        output.backward(grad)
        found.append((output, *(tensor.grad for tensor in given)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_linear_that_norms_what_it_puts_out(one_rank: Groups) -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, layernorm_epsilon=0.1)
    linear = NormedRowParallelLinear(
        6,
        8,
        config=config,
        init_method=torch.nn.init.normal_,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=True,
        tp_group=one_rank.tp,
    )
    assert {name for name, _ in linear.named_parameters()} == {"weight", "post_layernorm.weight"}
    with torch.no_grad():
        linear.post_layernorm.weight.copy_(torch.arange(8.0))
    x = torch.randn(3, 1, 6)
    plain = x @ linear.weight.T
    expected = plain / (plain.square().mean(-1, keepdim=True) + 0.1).sqrt() * torch.arange(8.0)
    output, bias = linear(x)
    torch.testing.assert_close(output, expected)
    assert bias is None
