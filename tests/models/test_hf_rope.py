"""Rotary positions as either generation of transformers writes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig

from megarl.core.errors import UserError
from megarl.models.config import Rope
from megarl.models.hf_fields import Fields
from megarl.models.hf_rope import read_layered_rope, read_rope

PATH = Path("model/config.json")
POSITIONS = {"max_position_embeddings": 4096}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read(default_theta: float = 500.0, **raw: Any) -> Rope:
    return read_rope(Fields(POSITIONS | raw, PATH), default_theta)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({}, Rope(5e5)),
        ({"rope_type": "default"}, Rope(5e5)),
        ({"rope_type": "linear", "factor": 8}, Rope(5e5, "linear", factor=8.0)),
        (
            {"rope_type": "llama3", **LLAMA3},
            Rope(5e5, "llama3", factor=8.0, original_positions=8192, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
        (
            {"rope_type": "linear", "factor": 8, "mscale_all_dim": 0.7},
            Rope(5e5, "linear", factor=8.0, mscale_all_dim=0.7),
        ),
        ({"rope_type": "yarn", **YARN}, Rope(5e5, "yarn", factor=4.0, original_positions=1024)),
        (
            {"rope_type": "yarn", **YARN, "truncate": None},  # null is no
            Rope(5e5, "yarn", factor=4.0, original_positions=1024, truncate=False),
        ),
        (
            {"rope_type": "yarn", "original_max_position_embeddings": 512, "factor": None},
            Rope(5e5, "yarn", factor=8.0, original_positions=512),
        ),
        ({"rope_type": "yarn", "factor": 2.0}, Rope(5e5, "yarn", factor=2.0, original_positions=4096)),
        (
            {
                "rope_type": "yarn",
                **YARN,
                "beta_fast": 16,
                "beta_slow": 2,
                "mscale": 0.5,
                "mscale_all_dim": 0,
                "attention_factor": 1.5,
                "truncate": False,
            },
            Rope(
                5e5,
                "yarn",
                factor=4.0,
                original_positions=1024,
                beta_fast=16.0,
                beta_slow=2.0,
                mscale=0.5,
                mscale_all_dim=0.0,
                attention_factor=1.5,
                truncate=False,
            ),
        ),
    ],
)
def test_scaling_in_either_place(scaling: dict[str, Any], expected: Rope) -> None:
    assert read(rope_parameters={"rope_theta": 5e5, **scaling}) == expected
    old = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    assert read(rope_theta=5e5, rope_scaling=old or None) == expected


def test_the_older_key_is_heard_where_somebody_put_it_beside_the_newer() -> None:
    """As transformers does: a config that it wrote, to which YaRN was added by hand."""
    both = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "rope_scaling": {"rope_type": "yarn", **YARN},
    }
    theirs = LlamaConfig(**POSITIONS, rope_theta=1e6, **both).rope_parameters
    assert (theirs["rope_type"], theirs["rope_theta"]) == ("yarn", 1e6)
    assert read(rope_theta=1e6, **both) == Rope(1e6, "yarn", factor=4.0, original_positions=1024)
    layered = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    fields = Fields(
        POSITIONS | {"rope_parameters": layered, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, PATH
    )
    with pytest.raises(UserError, match="rope_scaling beside rope_parameters"):
        read_layered_rope(fields, 1e6)


def test_the_base_is_the_familys_where_no_key_says() -> None:
    assert read() == read(rope_parameters={"rope_type": "default"}) == read(rope_parameters=None) == Rope(500.0)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"rope_theta": None}, "rope_theta is None; a number over 0 is wanted"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_theta is None; a number over 0 is wanted"),
        ({"rope_scaling": {"type": None, "factor": 4.0}}, "RoPE scaling of type None is not supported"),
        ({"rope_parameters": {"rope_type": None, "type": "linear", "factor": 4.0}}, "RoPE scaling of type None is not"),
    ],
)
def test_null_is_neither_base_nor_kind(raw: dict[str, Any], says: str) -> None:
    """transformers computes nothing with either; what is in the object goes before what is beside it."""
    with pytest.raises(UserError, match=re.escape(says)):
        read(**raw)
    assert read(rope_theta=None, rope_parameters={"rope_theta": 100.0}) == Rope(100.0)


def test_the_first_context_beside_the_scaling_goes_before_the_one_in_it() -> None:
    assert read(original_max_position_embeddings=256, rope_scaling={"type": "yarn", **YARN}).original_positions == 256


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (
            {"rope_scaling": {"type": "dynamic", "factor": 4}},
            "type 'dynamic' is not supported; these are: default, lin",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is None"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": -1}}, "factor is -1"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": "big"}}, "mscale is 'big'"),
        ({"rope_parameters": {"rope_type": "yarn", **YARN, "truncate": 1}}, "truncate is 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; an object"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
    ],
)
def test_what_is_not_supported(raw: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        read(**raw)


def test_layers_of_two_kinds_in_either_generation() -> None:
    expected = (Rope(1e6, "linear", factor=8.0), Rope(1e4))
    new = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "rope_theta": None,
    }
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    bare = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    for raw in ({"rope_parameters": new}, old, bare):
        assert read_layered_rope(Fields(POSITIONS | raw, PATH), 1e6) == expected


def test_of_layers_of_two_kinds_what_transformers_passes_over_is_refused_or_passed_over() -> None:
    older = {"rope_scaling": {"type": "linear", "factor": 8.0}}
    assert Gemma3TextConfig(**older).rope_parameters["full_attention"]["rope_type"] == "default"
    with pytest.raises(UserError, match=r"type is 'linear'; in rope_scaling, rope_type is wanted in its place"):
        read_layered_rope(Fields(POSITIONS | older, PATH), 1e6)
    outside = {"original_max_position_embeddings": 16, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}
    theirs = Gemma3TextConfig(**outside).rope_parameters["full_attention"]
    read_everywhere, _ = read_layered_rope(Fields(POSITIONS | outside, PATH), 1e6)
    assert read_everywhere.original_positions == theirs["original_max_position_embeddings"] == 8192


def test_layers_of_two_kinds_are_not_stretched_by_yarn() -> None:
    fields = Fields(POSITIONS | {"rope_parameters": {"full_attention": {"rope_type": "yarn", **YARN}}}, PATH)
    with pytest.raises(UserError, match="'yarn' is not supported where layers differ"):
        read_layered_rope(fields, 1e6)
