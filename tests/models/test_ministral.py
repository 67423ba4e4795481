"""Configs of Ministral 3, and queries that grow with their position: as transformers reads and computes them."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Ministral3Config
from transformers.models.ministral3.modeling_ministral3 import Ministral3RotaryEmbedding, get_llama_4_attn_scale

from megarl.core.errors import UserError
from megarl.models.config import Rope
from megarl.models.packed import packed_params
from megarl.models.rope import attention_factor, inverse_frequencies, position_scale
from megarl.models.rotary import held_positions, scale_by_position
from tests.models.test_families import PATH, SIZES, parse

# As in the text parts of Ministral-3-8B, but for the number of layers.
ROPE: dict[str, Any] = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 16.0,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16384,
    "rope_theta": 1000000.0,
    "rope_type": "yarn",
}
MINISTRAL: dict[str, Any] = {
    **SIZES,
    "architectures": ["Ministral3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rope_parameters": ROPE,
    "sliding_window": None,
}
# As in the instruct models: one scale a tensor.
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
GROWS = Rope(1e4, original_positions=4, position_beta=0.5)
# Number of context-parallel ranks, and whose.
RANKS = [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]


def rank_of(cp: int, rank: int) -> Any:
    return SimpleNamespace(size=lambda: cp, rank=lambda: rank)


def without(key: str) -> dict[str, Any]:
    return {"rope_parameters": {each: value for each, value in ROPE.items() if each != key}}


def test_ministral_3() -> None:
    config = parse(MINISTRAL)
    assert (config.head_dim, config.qkv_bias, config.qk_norm, config.window) == (128, False, False, None)
    assert config.rope == Rope(
        1e6, "yarn", factor=16.0, original_positions=16384, mscale=1.0, mscale_all_dim=1.0, position_beta=0.1
    )
    assert attention_factor(config.rope) == 1.0
    assert parse(MINISTRAL, sliding_window=4).local_layers == {0, 1, 2, 3, 4, 5}


def test_what_no_key_says_is_what_transformers_takes() -> None:
    theirs = Ministral3Config()
    absent = dict.fromkeys(("rope_parameters", "head_dim", "sliding_window", "tie_word_embeddings"), "absent")
    config = parse(MINISTRAL, **absent, vocab_size=theirs.vocab_size)
    assert (config.head_dim, config.window, config.pad_token_id) == (theirs.head_dim, None, theirs.pad_token_id)
    assert config.tied_embeddings == theirs.tie_word_embeddings
    assert config.rope == parse(MINISTRAL).rope == parse(MINISTRAL, rope_parameters=theirs.rope_parameters).rope
    # An empty object says that nothing is scaled; an older key is heard as in other families.
    assert "llama_4_scaling_beta" not in Ministral3Config(rope_parameters={}).rope_parameters
    older = parse(MINISTRAL, rope_parameters="absent", rope_scaling=ROPE | {"factor": 2.0})
    assert older.rope.factor == Ministral3Config(rope_scaling=ROPE | {"factor": 2.0}).rope_parameters["factor"] == 2.0


@pytest.mark.parametrize(
    "changes",
    [
        *({"rope_parameters": ROPE | more} for more in ({}, {"mscale": 0.5}, {"attention_factor": 1.3})),
        {"rope_parameters": ROPE | {"rope_type": "linear"}},
        {"rope_parameters": ROPE | {"rope_type": "linear"}, "original_max_position_embeddings": 16384},
        {"original_max_position_embeddings": 8192},
        {"original_max_position_embeddings": 8192, "rope_parameters": None},
        {"rope_parameters": {key: value for key, value in ROPE.items() if not key.startswith("original")}},
    ],
)
def test_rotary_positions_are_what_transformers_makes_of_them(changes: dict[str, Any]) -> None:
    """It reads the first context while it makes its frequencies: one at the top of the config then goes before the other."""
    rope = parse(MINISTRAL | changes).rope
    theirs = Ministral3Config(**copy.deepcopy(MINISTRAL | changes))
    rotary = Ministral3RotaryEmbedding(theirs)
    torch.testing.assert_close(inverse_frequencies(rope, 128), rotary.inv_freq, rtol=1e-6, atol=0)
    assert attention_factor(rope) == pytest.approx(rotary.attention_scaling, rel=1e-12)
    assert rope.original_positions == theirs.rope_parameters["original_max_position_embeddings"]
    assert rope.position_beta == theirs.rope_parameters["llama_4_scaling_beta"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (without("llama_4_scaling_beta"), "llama_4_scaling_beta is None; a number from 0 is wanted in rope_parameters"),
        ({"rope_parameters": ROPE | {"llama_4_scaling_beta": -0.1}}, "llama_4_scaling_beta is -0.1"),
        ({"rope_parameters": {}}, "llama_4_scaling_beta is None"),
        (
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            "original_max_position_embeddings is None; a whole number",
        ),
        (
            {"rope_parameters": ROPE | {"rope_type": "linear"}, "original_max_position_embeddings": 8192},
            "original_max_position_embeddings is 8192; 16384, as in rope_parameters, or none is wanted",
        ),
        ({"quantization_config": PER_TENSOR}, "those of quant_method fp8, fmt e4m3 and a weight_block_size of rows"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"model_type": "mistral"}, "model_type 'mistral' is not that of Ministral3ForCausalLM"),
    ],
)
def test_what_the_models_do_not_do_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        parse(MINISTRAL, **changes)
    assert said in str(refused.value) and str(PATH) in str(refused.value)


def test_the_scale_is_that_of_transformers_over_the_whole_context() -> None:
    """1 up to the first context; 1 + 0.1 ln 2 from its first token beyond on, which is 16384."""
    rope, positions = parse(MINISTRAL).rope, torch.arange(0, 262144, 1023)
    scale = position_scale(rope, positions)
    torch.testing.assert_close(
        scale, get_llama_4_attn_scale(positions[None], 0.1, 16384)[0, 0, :, 0], rtol=1e-6, atol=0
    )
    edge = position_scale(rope, torch.tensor([0, 16383, 16384, 32767, 32768])).tolist()
    assert edge == pytest.approx([1, 1, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(3)])


@pytest.mark.parametrize(("cp", "rank"), RANKS)
@pytest.mark.parametrize("behind", [0, 5])
def test_each_rank_knows_the_positions_of_its_chunks(cp: int, rank: int, behind: int, device: str) -> None:
    """Sequences of 2 x CP chunks of 3, 0, 1 and 2 tokens; rank r holds chunks r and 2 x CP - 1 - r of each."""
    sizes = [3, 0, 1, 2]
    bounds = torch.tensor([0, *(2 * cp * size for size in sizes)], device=device).cumsum(0).int()
    expected = [chunk * size + at for size in sizes for chunk in (rank, 2 * cp - 1 - rank) for at in range(size)]
    found = held_positions(len(expected) + behind, bounds, rank_of(cp, rank))
    assert found[: len(expected)].tolist() == expected and len(found) == len(expected) + behind


@pytest.mark.parametrize("cp", [1, 2])
def test_queries_alone_are_scaled_packed_and_dense(cp: int, device: str) -> None:
    random = torch.Generator(device).manual_seed(0)
    query, key = (torch.randn(16, 2, 8, generator=random, device=device) for _ in range(2))
    bounds = torch.tensor([0, 4 * cp, 16 * cp], dtype=torch.int32, device=device)
    rank, whole = rank_of(cp, cp - 1), torch.arange(16 * cp, device=device)
    held = (whole if cp == 1 else whole[8:24]).tolist()  # the last rank's chunks: of two, those in the middle
    params = packed_params(bounds, cp)
    (scaled, same), options = scale_by_position(
        GROWS, rank, torch.nn.Identity(), (query, key), {"packed_seq_params": params}
    )
    assert same is key and options["packed_seq_params"] is params
    positions = held_positions(16, bounds, rank).tolist()
    by_hand = [1 + 0.5 * math.log(1 + position // 4) for position in positions]
    assert len(set(by_hand)) >= 3
    torch.testing.assert_close(scaled, query * torch.tensor(by_hand, device=device)[:, None, None])
    (dense, _), _ = scale_by_position(GROWS, rank, torch.nn.Identity(), (query[:, None], key), {})
    by_hand = [1 + 0.5 * math.log(1 + position // 4) for position in held]
    torch.testing.assert_close(dense[:, 0], query * torch.tensor(by_hand, device=device)[:, None, None])
