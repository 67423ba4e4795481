"""The mapping is exact in both directions, for any sizes and any tensor-parallel size; and the layouts, by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.models.config import ModelConfig, Rope
from megarl.models.mapping import join, merge, split
from megarl.models.rules import LOCAL_NAMES, TRANSFORMER_ENGINE_NAMES, NameTable, Rule, expected_tensors, rules, slices


def config_of(
    kv_heads: int, queries: int, head_dim: int, hidden: int, ffn: int, vocab: int, **flags: bool
) -> ModelConfig:
    return ModelConfig(
        family="any",
        architecture="any",
        num_layers=2,
        hidden_size=hidden,
        num_heads=kv_heads * queries,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_hidden_size=ffn,
        vocab_size=vocab,
        max_positions=64,
        rope=Rope(1e4),
        norm_eps=1e-6,
        tied_embeddings=flags.get("tied", False),
        qkv_bias=flags.get("bias", False),
        qk_norm=flags.get("norm", False),
        eos_token_ids=(),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelConfig, int]:
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    small = st.integers(1, 3)
    flags = {name: draw(st.booleans()) for name in ("tied", "bias", "norm")}
    kv_heads, ffn, vocab = tp * draw(small), tp * draw(small), draw(st.integers(1, 13))
    return config_of(kv_heads, draw(small), draw(small), draw(st.integers(1, 5)), ffn, vocab, **flags), tp


def random_tensors(config: ModelConfig) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in expected_tensors(config).items()}


def parts(rule: Rule, tensors: list[torch.Tensor], config: ModelConfig, tp: int) -> list[torch.Tensor]:
    """What each rank holds."""
    return [
        merge(
            rule,
            [tensor[part] for tensor, part in zip(tensors, slices(rule, config, rank, tp), strict=True)],
            config,
            tp,
        )
        for rank in range(tp)
    ]


@pytest.mark.parametrize("names", [LOCAL_NAMES, TRANSFORMER_ENGINE_NAMES])
@settings(deadline=None, max_examples=60)
@given(case=cases())
def test_there_and_back_is_bit_equal(names: NameTable, case: tuple[ModelConfig, int]) -> None:
    config, tp = case
    tensors = random_tensors(config)
    found = {}
    for rule in rules(config, names):
        mine = parts(rule, [tensors[name] for name in rule.hf], config, tp)
        assert len({part.shape for part in mine}) == 1, "every rank holds as much"
        found.update(split(rule, join(rule, mine), config))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@settings(deadline=None, max_examples=30)
@given(case=cases())
def test_the_parts_of_all_ranks_are_the_whole(case: tuple[ModelConfig, int]) -> None:
    config, tp = case
    tensors = random_tensors(config)
    for rule in rules(config, LOCAL_NAMES):
        whole = merge(rule, [tensors[name] for name in rule.hf], config, 1)
        joined = join(rule, parts(rule, [tensors[name] for name in rule.hf], config, tp))
        assert torch.equal(joined[: len(whole)], whole)
        assert not joined[len(whole) :].any(), "padding is zero"


def rule_named(config: ModelConfig, end: str) -> Rule:
    return next(rule for rule in rules(config, LOCAL_NAMES) if rule.megatron.endswith(end))


def test_queries_stand_beside_their_keys_and_values() -> None:
    config = config_of(kv_heads=2, queries=2, head_dim=1, hidden=1, ffn=2, vocab=4)
    rule = rule_named(config, "layers.1.self_attention.linear_qkv.weight")
    assert rule.hf == tuple(f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv")
    q, k, v = (
        torch.tensor([[1.0], [2.0], [3.0], [4.0]]),
        torch.tensor([[10.0], [20.0]]),
        torch.tensor([[100.0], [200.0]]),
    )
    assert merge(rule, [q, k, v], config, 1).flatten().tolist() == [1, 2, 10, 100, 3, 4, 20, 200]
    assert [part.flatten().tolist() for part in parts(rule, [q, k, v], config, 2)] == [[1, 2, 10, 100], [3, 4, 20, 200]]


def test_each_rank_holds_a_part_of_gate_and_of_up() -> None:
    config = config_of(kv_heads=2, queries=1, head_dim=1, hidden=1, ffn=4, vocab=4)
    gate, up = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([[5.0], [6.0], [7.0], [8.0]])
    held = parts(rule_named(config, "layers.0.mlp.linear_fc1.weight"), [gate, up], config, 2)
    assert [part.flatten().tolist() for part in held] == [[1, 2, 5, 6], [3, 4, 7, 8]]


def test_output_projections_are_cut_by_columns() -> None:
    config = config_of(kv_heads=2, queries=1, head_dim=1, hidden=2, ffn=4, vocab=4)
    weight = torch.arange(8.0).reshape(2, 4)
    held = parts(rule_named(config, "layers.0.mlp.linear_fc2.weight"), [weight], config, 2)
    assert [part.tolist() for part in held] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_the_last_rank_holds_the_padding_of_the_vocabulary() -> None:
    config = config_of(kv_heads=2, queries=1, head_dim=1, hidden=1, ffn=2, vocab=3)
    rule = rule_named(config, "word_embeddings.weight")
    held = parts(rule, [torch.tensor([[1.0], [2.0], [3.0]])], config, 2)
    assert [part.flatten().tolist() for part in held] == [[1, 2], [3, 0]]
    assert split(rule, join(rule, held), config)[0][1].flatten().tolist() == [1, 2, 3]


def test_a_tied_output_layer_is_no_tensor_of_its_own() -> None:
    tied = config_of(2, 1, 1, 1, 2, 4, tied=True)
    assert "lm_head.weight" not in expected_tensors(tied)
    assert "lm_head.weight" in expected_tensors(config_of(2, 1, 1, 1, 2, 4))
