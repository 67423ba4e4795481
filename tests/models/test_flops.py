"""Counted by hand on small numbers, and by torch's own counter on transformers' models."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from megarl.models.config import Delta, Mla, ModelConfig, Moe, Rope
from megarl.models.flops import forward_flops, mfu, recompute_flops, train_flops
from megarl.models.hf_config import load_model_config
from tests.support.tiny import CONFIGS, write_tiny_model

DENSE = ModelConfig(
    family="qwen3",
    architecture="Qwen3ForCausalLM",
    num_layers=2,
    hidden_size=10,
    num_heads=4,
    num_kv_heads=2,
    head_dim=3,
    ffn_hidden_size=7,
    vocab_size=100,
    max_positions=512,
    rope=Rope(theta=1e4),
    norm_eps=1e-6,
    tied_embeddings=False,
    qkv_bias=False,
    qk_norm=True,
    eos_token_ids=(2,),
)


def test_dense_terms_by_hand():
    flops = forward_flops(DENSE, [3])
    # A layer: queries 10 x 12, keys and values 10 x 6 each, output 12 x 10 = 360 weights; three tokens, two layers.
    assert flops.projections == 2 * 3 * 2 * 360
    # 1 + 2 + 3 = 6 pairs, each 4 heads x (3 + 3) multiplications.
    assert flops.attention == 2 * 2 * 6 * 24
    assert flops.mlp == 2 * 3 * 2 * (3 * 10 * 7)
    assert flops.logits == 2 * 3 * 10 * 100
    assert flops.total == 4320 + 576 + 2520 + 6000
    assert train_flops(DENSE, [3]) == 3 * flops.total


def test_packed_sequences_do_not_see_each_other():
    apart, together = forward_flops(DENSE, [3, 5, 0, 1]), forward_flops(DENSE, [9])
    assert apart.linear == together.linear
    assert apart.attention == 2 * 2 * 24 * (6 + 15 + 0 + 1)
    assert together.attention == 2 * 2 * 24 * 45


def test_linear_attention_by_hand():
    delta = Delta(num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, conv_width=4)
    config = replace(DENSE, delta=delta, linear_layers=frozenset({0}), output_gate=True)
    flops = forward_flops(config, [2, 1])
    # Layer 0: queries and keys 6 each, values and gates 20 each, two numbers for each of 4 heads, output 20: 10 x 80 weights.
    # Layer 1: queries and gates 12 each, keys and values 6 each, output 12: 10 x 48.
    assert flops.projections == 2 * 3 * (800 + 480)
    # Layer 0: three times 4 states of 3 x 5, and four tokens of 32 channels. Layer 1: 3 + 1 pairs of 24.
    assert flops.attention == 2 * (3 * (3 * 60 + 4 * 32) + 4 * 24)


def test_a_window_leaves_the_last_keys():
    config = replace(DENSE, window=2, local_layers=frozenset({1}))
    # Five tokens see 1, 2, 3, 4, 5 keys in layer 0 and 1, 2, 2, 2, 2 in layer 1.
    assert forward_flops(config, [5]).attention == 2 * 24 * (15 + 9)
    assert forward_flops(config, [5]).linear == forward_flops(DENSE, [5]).linear
    assert forward_flops(config, [1]).attention == forward_flops(DENSE, [1]).attention


def test_experts_count_where_they_are_chosen():
    moe = Moe(num_experts=8, top_k=2, ffn_hidden_size=5, shared_ffn_hidden_size=6)
    config = replace(DENSE, moe=moe, moe_layers=frozenset({1}))
    # Layer 0 is dense; layer 1 has a router 10 x 8, two experts of 3 x 10 x 5, shared ones of 3 x 10 x 6.
    assert forward_flops(config, [4]).mlp == 2 * 4 * (210 + 80 + 300 + 180)
    assert forward_flops(replace(config, moe_layers=frozenset()), [4]).mlp == forward_flops(DENSE, [4]).mlp


@pytest.mark.parametrize(("q_rank", "query"), [(None, 10 * 4 * 5), (6, 10 * 6 + 6 * 4 * 5)])
def test_latent_attention_by_hand(q_rank, query):
    mla = Mla(q_rank=q_rank, kv_rank=8, nope_dim=3, rope_dim=2, v_dim=7)
    config = replace(DENSE, num_layers=1, num_kv_heads=4, head_dim=5, mla=mla)
    flops = forward_flops(config, [2])
    # Down to 8 + 2, up to 4 heads x (3 + 7), out of 4 x 7.
    assert flops.projections == 2 * 2 * (query + 10 * 10 + 8 * 4 * 10 + 4 * 7 * 10)
    assert flops.attention == 2 * 3 * 4 * (5 + 7)


def test_recompute_is_counted_apart():
    forward = forward_flops(DENSE, [3, 4])
    assert recompute_flops(DENSE, [3, 4], "none") == 0
    assert recompute_flops(DENSE, [3, 4], "selective") == forward.attention
    assert recompute_flops(DENSE, [3, 4], "full") == forward.projections + forward.attention + forward.mlp


def test_frozen_weights_need_no_gradient_of_their_own():
    forward = forward_flops(DENSE, [3, 4])
    assert train_flops(DENSE, [3, 4], weight_gradients=False) == 2 * forward.linear + 3 * forward.attention


def test_a_score_is_one_output_of_a_vocabularys():
    forward = forward_flops(DENSE, [3, 4])
    logits = 2 * 7 * 10 * 1
    assert train_flops(DENSE, [3, 4], scores=True) == pytest.approx(3 * (forward.total - forward.logits + logits))


def test_mfu():
    assert mfu(3e15, seconds=2, num_devices=3, peak_flops=1e15) == 0.5


@given(lengths=st.lists(st.integers(0, 300), max_size=6), window=st.integers(1, 320))
def test_pairs_are_those_of_a_mask(lengths, window):
    config = replace(DENSE, num_layers=1, window=window, local_layers=frozenset({0}))
    pairs = 0
    for length in lengths:
        query, key = torch.arange(length)[:, None], torch.arange(length)[None]
        pairs += int(((key <= query) & (query - key < window)).sum())
    assert forward_flops(config, lengths).attention == 2 * 24 * pairs


@pytest.mark.parametrize("family", CONFIGS)
def test_torch_counts_the_same_on_transformers(tmp_path, family):
    # Linear attention is counted token by token, by hand: its chunks multiply more.
    linear = family in ("qwen3_5", "qwen3_5_moe", "qwen3_next")
    write_tiny_model(tmp_path, family, **({"layer_types": ["full_attention"] * 3} if linear else {}))
    config = load_model_config(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    length = 24
    counter = FlopCounterMode(display=False)
    with counter:
        model(input_ids=torch.arange(1, length + 1)[None], use_cache=False).logits.sum().backward()
    # Eager attention multiplies the whole square and masks it afterwards. What remains is the angles of rotary positions.
    ours = forward_flops(replace(config, window=None if config.window is None else length), [length])
    square = ours.attention * 2 * length / (length + 1)
    assert counter.get_total_flops() == pytest.approx(3 * (ours.linear + square), rel=1e-4)
