"""Configs of Phi-3 and Phi-4: what of them megarl reads as transformers does, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Phi3Config

from megarl.core.errors import UserError
from megarl.models.config import Rope
from tests.models.test_families import PATH, SIZES, parse

# Phi-4's own, but for the number of layers.
PHI: dict[str, Any] = {
    **SIZES,
    "architectures": ["Phi3ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "num_attention_heads": 40,
    "num_key_value_heads": 10,
    "original_max_position_embeddings": 16384,
    "pad_token_id": 5,
    "rope_scaling": None,
    "rope_theta": 250000,
    "sliding_window": None,
}


def test_phi_4() -> None:
    config = parse(PHI)
    assert (config.qkv_bias, config.qk_norm, config.head_dim, config.rotated) == (False, False, 128, 128)
    assert (config.rope, config.window, config.interleaved_rope) == (Rope(250000.0), None, False)
    absent = parse(PHI, sliding_window="absent", pad_token_id="absent", vocab_size=32064)
    assert (absent.window, absent.pad_token_id) == (Phi3Config().sliding_window, Phi3Config().pad_token_id)


def test_every_layer_of_phi_3_slides_the_window_that_is_set() -> None:
    config = parse(PHI, sliding_window=2047)
    assert (config.window, config.local_layers) == (2047, {0, 1, 2, 3, 4, 5})


@pytest.mark.parametrize("keys", [{}, {"partial_rotary_factor": 0.75}])
def test_the_rotated_share_of_a_head_is_the_one_that_transformers_takes(keys: dict[str, Any]) -> None:
    share = Phi3Config(**keys).rope_parameters["partial_rotary_factor"]
    assert parse(PHI, **keys).rotated == share * 128


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        # Phi-3-mini-128k's and Phi-4-mini's: other frequencies for sequences longer than those of the first training.
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, ["'longrope'"]),
        ({"rope_scaling": {"type": "su"}}, ["'su'"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["'yarn'", "transformers has none"]),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, ["'linear'", "transformers has none"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'"]),
        ({"partial_rotary_factor": 0.01}, ["partial_rotary_factor is 0.01"]),
        ({"use_sliding_window": True}, ["use_sliding_window=True"]),
    ],
)
def test_what_the_models_do_not_do_is_refused(changes: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        parse(PHI, **changes)
    assert all(text in str(refused.value) for text in [str(PATH), *said])
