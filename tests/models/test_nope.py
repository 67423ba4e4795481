"""Configs of EXAONE 4 and SmolLM3: which of their layers have no positions, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Exaone4Config, SmolLM3Config

from megarl.core.errors import UserError
from megarl.models.config import Rope
from megarl.models.hf_layers import period_of
from tests.models.test_families import SIZES, parse

LOCAL, GLOBAL = "sliding_attention", "full_attention"
# EXAONE-4.0-32B's sizes, but for the number of layers.
EXAONE: dict[str, Any] = {
    **SIZES,
    "architectures": ["Exaone4ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 27392,
    "layer_types": [LOCAL, LOCAL, LOCAL, GLOBAL] * 2,
    "max_position_embeddings": 131072,
    "num_attention_heads": 40,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
    "tie_word_embeddings": False,
}
# SmolLM3-3B's.
SMOL: dict[str, Any] = {
    **SIZES,
    "architectures": ["SmolLM3ForCausalLM"],
    "layer_types": [GLOBAL] * 8,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 2,
    "num_hidden_layers": 8,
    "pad_token_id": 4,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
}


def test_exaone_has_windows_or_no_positions() -> None:
    config = parse(EXAONE)
    assert (config.window, config.local_layers, config.unrotated_layers) == (4096, {0, 1, 2, 4, 5, 6}, {3, 7})
    assert config.qk_norm and not config.whole_qk_norm and config.post_norms and not config.pre_norms
    assert (config.rope.kind, config.rope.factor, config.local_rope) == ("llama3", 16.0, None)
    assert [config.layer_rope(layer) for layer in (2, 3)] == [config.rope, None]
    named = [GLOBAL, LOCAL] * 4  # which transformers goes by, whatever the pattern says
    assert parse(EXAONE, layer_types=named).unrotated_layers == {0, 2, 4, 6}
    everywhere = parse(EXAONE, layer_types=[GLOBAL] * 8)
    assert (everywhere.window, everywhere.unrotated_layers) == (None, frozenset(range(8)))


def test_exaone_without_windows_has_positions_everywhere() -> None:
    small = parse(EXAONE, sliding_window=None, sliding_window_pattern=None, layer_types=[GLOBAL] * 8)
    assert (small.window, small.local_layers, small.unrotated_layers) == (None, frozenset(), frozenset())


def test_what_exaones_config_does_not_say_is_transformers_default() -> None:
    theirs = Exaone4Config(num_hidden_layers=8)
    absent = dict.fromkeys(("layer_types", "sliding_window", "sliding_window_pattern", "rope_theta"), "absent")
    config = parse(EXAONE, **absent, rope_scaling=None, tie_word_embeddings="absent")
    assert config.local_layers == {index for index, kind in enumerate(theirs.layer_types) if kind == LOCAL}
    assert config.window == theirs.sliding_window
    assert config.rope == Rope(theirs.rope_parameters["rope_theta"])
    assert (config.tied_embeddings, config.pad_token_id) == (theirs.tie_word_embeddings, theirs.pad_token_id)


def test_smollm_has_no_positions_where_its_config_says_so() -> None:
    config = parse(SMOL)
    assert (config.unrotated_layers, config.window, config.rope) == ({3, 7}, None, Rope(5e6))
    assert parse(SMOL, no_rope_layers=[0, 1] * 4).unrotated_layers == {0, 2, 4, 6}
    assert parse(SMOL, no_rope_layers=[1] * 8 + [0]).unrotated_layers == frozenset()  # of a model cut short
    unnamed = parse(SMOL, no_rope_layers="absent", no_rope_layer_interval=3)
    assert unnamed.unrotated_layers == {2, 5}
    theirs = SmolLM3Config(num_hidden_layers=8)
    absent = parse(
        SMOL,
        **dict.fromkeys(("layer_types", "no_rope_layers", "no_rope_layer_interval", "rope_theta"), "absent"),
        tie_word_embeddings="absent",
        pad_token_id="absent",
        vocab_size=theirs.vocab_size,
    )
    assert absent.unrotated_layers == {index for index, has in enumerate(theirs.no_rope_layers) if not has}
    assert (absent.rope.theta, absent.pad_token_id) == (theirs.rope_parameters["rope_theta"], theirs.pad_token_id)
    assert absent.tied_embeddings == theirs.tie_word_embeddings


def test_scales_of_rope_are_those_of_layers_that_have_it() -> None:
    """yarn multiplies logits of rotated layers alone, so that layers differ in more than in what is turned."""
    assert not parse(SMOL).mixed_ropes and not parse(EXAONE).mixed_ropes
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}
    assert parse(SMOL, rope_scaling=yarn).mixed_ropes
    assert not parse(SMOL, rope_scaling=yarn, no_rope_layers=[1] * 8).mixed_ropes


@pytest.mark.parametrize(
    ("raw", "changes", "says"),
    [
        (EXAONE, {"layer_types": "absent"}, r"lacks layer_types.*sliding_window is 4096.*_pattern is 'LLLG'\. Write"),
        (
            EXAONE,
            {"layer_types": "absent", "sliding_window": None, "sliding_window_pattern": 4},
            r"sliding_window is None",
        ),
        (EXAONE, {"sliding_window": None}, r"layer_types with sliding_attention in .* where sliding_window=None"),
        (EXAONE, {"attention_bias": True}, r"attention_bias=True \(biases in attention\) is not supported"),
        (
            SMOL,
            {"use_sliding_window": True, "sliding_window": 64},
            r"use_sliding_window=True \(sliding-window attention\)",
        ),
        (SMOL, {"layer_types": [GLOBAL, LOCAL] * 4}, r"layer_types with sliding_attention in layers 1, 3"),
        (SMOL, {"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\]; 1 for each of the 8 layers"),
        (
            SMOL,
            {"no_rope_layers": [2] * 8},
            r"1 for each of the 8 layers \(num_hidden_layers\) that has RoPE and 0 for",
        ),
    ],
)
def test_what_is_not_supported(raw: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse(raw, **changes)


@pytest.mark.parametrize(
    ("local", "layers", "period"),
    [({0, 1, 2, 4, 5, 6}, 8, 4), (set(), 3, 1), ({0, 1, 2}, 3, 4), ({0, 2}, 3, 2), ({1}, 3, None), ({0, 1, 3}, 4, 3)],
)
def test_a_period_is_found_where_layers_have_one(local: set[int], layers: int, period: int | None) -> None:
    assert period_of(frozenset(local), layers) == period
