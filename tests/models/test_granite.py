"""Configs of Granite: what of them megarl reads as transformers does, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GraniteConfig, GraniteMoeConfig

from megarl.core.errors import UserError
from megarl.models.config import Moe, Rope
from megarl.models.rules import expected_tensors
from megarl.placement.weight_sync import num_tensors
from tests.models.test_families import SIZES, of, parse

# Granite-3.3-8B's sizes, but for the number of layers.
GRANITE: dict[str, Any] = {
    **SIZES,
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "logits_scaling": 16.0,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
}


def test_granite() -> None:
    config = parse(GRANITE)
    assert (config.family, config.head_dim, config.rope, config.tied_embeddings) == ("granite", 128, Rope(1e7), True)
    assert (config.embedding_scale, config.query_scale, config.residual_scale) == (12.0, 0.0078125, 0.22)
    assert config.logit_scale == 1 / 16
    theirs, absent = GraniteConfig(), of("GraniteForCausalLM")
    assert absent.embedding_scale == theirs.embedding_multiplier
    assert absent.query_scale == theirs.attention_multiplier
    assert absent.residual_scale == theirs.residual_multiplier
    assert absent.logit_scale == theirs.logits_scaling
    # Keys that say nothing to other families.
    llama = parse(GRANITE, architectures=["LlamaForCausalLM"])
    assert (llama.embedding_scale, llama.query_scale, llama.residual_scale, llama.logit_scale) == (1.0, None, 1.0, 1.0)


def test_granite_with_experts() -> None:
    """Granite-3.1-3b-a800m's sizes, but for the number of layers."""
    experts = {"architectures": ["GraniteMoeForCausalLM"], "num_local_experts": 40, "num_experts_per_tok": 8}
    sizes = {"hidden_size": 1536, "intermediate_size": 512, "num_attention_heads": 24, "attention_multiplier": 0.015625}
    config = parse(GRANITE, **experts, **sizes)
    assert (config.family, config.head_dim, config.moe_layers) == ("granitemoe", 64, frozenset(range(6)))
    assert config.moe == Moe(40, 8, 512)
    assert (config.embedding_scale, config.query_scale, config.residual_scale) == (12.0, 0.015625, 0.22)
    theirs, absent = GraniteMoeConfig(), of("GraniteMoeForCausalLM", num_local_experts=8, num_experts_per_tok=2)
    assert absent.query_scale == theirs.attention_multiplier
    assert absent.logit_scale == theirs.logits_scaling
    assert absent.tied_embeddings == theirs.tie_word_embeddings
    assert absent.pad_token_id is theirs.pad_token_id is None
    assert absent.rope.theta == theirs.rope_parameters["rope_theta"]
    expected = expected_tensors(config)
    assert expected["model.layers.5.block_sparse_moe.input_linear.weight"] == (40, 1024, 1536)
    assert expected["model.layers.5.block_sparse_moe.output_linear.weight"] == (40, 1536, 512)
    assert num_tensors(config) == len(expected) == 6 * 9 + 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"residual_multiplier": 0}, r"residual_multiplier is 0; a number over 0 is wanted"),
        ({"logits_scaling": "16"}, r"logits_scaling"),
        # Of a model with experts transformers would take the heads' width for it, and of others end.
        ({"attention_multiplier": None}, r"attention_multiplier is None; a number over 0 is wanted"),
        ({"mlp_bias": True}, r"mlp_bias=True \(biases in the MLP\)"),
    ],
)
def test_what_is_not_supported(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse(GRANITE, **changes)
