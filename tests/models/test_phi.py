"""Configs of Phi-3 and Phi-4: what of them megarl reads as transformers does, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from megarl.core.errors import UserError
from megarl.models.config import Rope
from megarl.models.context import check_context
from megarl.models.rope import attention_factor, inverse_frequencies
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


def longrope(**keys: Any) -> dict[str, Any]:
    scaling = {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64} | keys
    return {"rope_scaling": scaling, "max_position_embeddings": 65536}


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
    "keys",
    [
        {},
        {"original_max_position_embeddings": "absent"},  # that of the object is passed over
        {"max_position_embeddings": 16384},
        {"max_position_embeddings": 8192},
        {"partial_rotary_factor": 0.75},
    ],
)
def test_longrope_is_what_transformers_makes_of_it_for_short_sequences(keys: dict[str, Any]) -> None:
    pairs = int(64 * keys.get("partial_rotary_factor", 1.0))
    factors = {"short_factor": [1 + pair / 7 for pair in range(pairs)], "long_factor": [40.0] * pairs}
    keys = longrope(**factors, original_max_position_embeddings=512) | keys
    config = parse(PHI, **keys)
    given = {key: value for key, value in (PHI | keys).items() if value != "absent"}
    given["rope_scaling"] = dict(given["rope_scaling"])  # transformers writes into it
    rotary = Phi3RotaryEmbedding(theirs := Phi3Config(**given))
    assert torch.equal(inverse_frequencies(config.rope, config.rotated), rotary.inv_freq)
    assert attention_factor(config.rope) == rotary.attention_scaling
    original = theirs.rope_parameters["original_max_position_embeddings"]
    assert config.context == min(original, theirs.max_position_embeddings)


def test_a_sample_that_would_have_the_long_factors_is_refused() -> None:
    config = parse(PHI, **longrope())
    check_context(config, 16384, "data.max_tokens")
    with pytest.raises(
        UserError, match=r"16385 tokens \(data.max_tokens\) .* 16384 .* longrope.* Lower the limit by 1 "
    ):
        check_context(config, 16385, "data.max_tokens")
    with pytest.raises(UserError, match="longer than the context of 8192 tokens"):
        check_context(parse(PHI, **longrope() | {"max_position_embeddings": 8192}), 8193, "data.max_tokens")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (longrope(short_factor=[1.0]), ["short_factor is [1.0]", "a list of 64 numbers"]),
        (longrope(short_factor=[0.0] * 64), ["short_factor is 0.0"]),
        (longrope(long_factor=None), ["long_factor is None", "a list of 64 numbers"]),
        (longrope(factor=8.0), ["factor is 8.0", "65536/16384"]),
        (longrope(attention_factor=1.2), ["attention_factor beside", "'longrope'"]),
        (longrope(short_mscale=1.2), ["short_mscale beside", "'longrope'"]),
        (longrope() | {"original_max_position_embeddings": 1}, ["original_max_position_embeddings is 1"]),
        (longrope() | {"rope_theta": 1}, ["rope_theta is 1"]),
        ({"rope_scaling": {"type": "su"}}, ["'su'"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["'yarn'", "these are: default, longrope"]),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, ["'linear'", "these are: default, longrope"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'"]),
        ({"partial_rotary_factor": 0.01}, ["partial_rotary_factor is 0.01"]),
        ({"use_sliding_window": True}, ["use_sliding_window=True"]),
    ],
)
def test_what_the_models_do_not_do_is_refused(changes: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        parse(PHI, **changes)
    assert all(text in str(refused.value) for text in [str(PATH), *said])
