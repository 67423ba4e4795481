"""The mapping is exact in both directions, for any model and any layout; and Megatron's arrangements, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from megarl.core.layout import Layout, place
from megarl.models.config import ModelConfig
from megarl.models.mapping import take, window
from megarl.models.parts import Dealing, num_parts, part_of
from megarl.models.rules import LayerSpec, Rule, rules
from tests.models.configs import PLAIN, cases, random_tensors
from tests.support.whole_tensors import merge, split


def rule_named(config: ModelConfig, end: str) -> Rule:
    return next(rule for rule in rules(config, "torch") if rule.megatron.endswith(end))


def cut(rule: Rule, tensors: list[Tensor], count: int) -> list[list[float]]:
    """What each of `count` ranks holds, row by row."""
    return [merge(rule, tensors, index, count).flatten().tolist() for index in range(count)]


@pytest.mark.parametrize("spec", ["torch", "transformer_engine"])
@settings(deadline=None, max_examples=50)
@given(case=cases())
def test_there_and_back_is_bit_equal(spec: LayerSpec, case: tuple[ModelConfig, Layout]) -> None:
    config, layout = case
    tensors = random_tensors(config)
    found: dict[str, Tensor] = {}
    for rule in rules(config, spec):
        sources, count = [tensors[source.name] for source in rule.sources], num_parts(rule, layout)
        found.update(split(rule, [merge(rule, sources, index, count) for index in range(count)]))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@settings(deadline=None, max_examples=30)
@given(case=cases())
def test_layout_to_layout_needs_no_way_round_by_hf(case: tuple[ModelConfig, Layout]) -> None:
    config, layout = case
    tensors = random_tensors(config)
    dealing = Dealing(config, layout)
    for rule in rules(config, "torch"):
        sources = [tensors[source.name] for source in rule.sources]
        held = [merge(rule, sources, index, num_parts(rule, layout)) for index in range(num_parts(rule, layout))]
        again = [tensor for _, tensor in split(rule, held)]
        assert torch.equal(merge(rule, again), merge(rule, sources))
        for holder, tensor in zip(dealing.holders(rule), held, strict=True):
            part = dealing.part(rule, place(holder, layout))
            for index, source in enumerate(sources):
                windows = [window(source, part, rows) for rows in part.ranges(index)]
                assert torch.equal(take(tensor, part, index), torch.cat(windows) if windows else tensor[:0])


def test_queries_stand_beside_their_keys_and_values() -> None:
    config = replace(PLAIN, num_heads=4, num_kv_heads=2, hidden_size=1)
    rule = rule_named(config, "layers.1.self_attention.linear_qkv.weight")
    assert [source.name for source in rule.sources] == [
        f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"
    ]
    q, k, v = (torch.tensor(rows)[:, None] for rows in ([1.0, 2.0, 3.0, 4.0], [10.0, 20.0], [100.0, 200.0]))
    assert cut(rule, [q, k, v], 1) == [[1, 2, 10, 100, 3, 4, 20, 200]]
    assert cut(rule, [q, k, v], 2) == [[1, 2, 10, 100], [3, 4, 20, 200]]
    assert cut(rule, [q, k, v], 4) == [[1, 2], [10, 100], [3, 4], [20, 200]]


def test_each_rank_holds_a_part_of_gate_and_of_up() -> None:
    rule = rule_named(replace(PLAIN, hidden_size=1), "layers.0.mlp.linear_fc1.weight")
    gate, up = torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None], torch.tensor([5.0, 6.0, 7.0, 8.0])[:, None]
    assert cut(rule, [gate, up], 1) == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert cut(rule, [gate, up], 2) == [[1, 2, 5, 6], [3, 4, 7, 8]]


def test_gate_and_up_in_one_tensor_are_cut_as_two_are() -> None:
    rule = rule_named(replace(PLAIN, hidden_size=1, family="glm4"), "layers.0.mlp.linear_fc1.weight")
    assert [source.name for source in rule.sources] == ["model.layers.0.mlp.gate_up_proj.weight"]
    both = torch.arange(1.0, 9.0)[:, None]
    assert cut(rule, [both], 1) == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert cut(rule, [both], 2) == [[1, 2, 5, 6], [3, 4, 7, 8]]
    second = part_of(rule, 1, 2)
    assert second.ranges(0) == [slice(2, 4), slice(6, 8)]
    assert take(merge(rule, [both], 1, 2), second, 0).flatten().tolist() == [3, 4, 7, 8]


def test_queries_keys_and_values_in_one_tensor_are_cut_as_three_are() -> None:
    config = replace(PLAIN, num_heads=4, num_kv_heads=2, hidden_size=1, family="phi3")
    rule = rule_named(config, "layers.1.self_attention.linear_qkv.weight")
    assert [source.name for source in rule.sources] == ["model.layers.1.self_attn.qkv_proj.weight"]
    together = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0, 20.0, 100.0, 200.0])[:, None]
    assert cut(rule, [together], 1) == [[1, 2, 10, 100, 3, 4, 20, 200]]
    assert cut(rule, [together], 2) == [[1, 2, 10, 100], [3, 4, 20, 200]]
    assert cut(rule, [together], 4) == [[1, 2], [10, 100], [3, 4], [20, 200]]
    second = part_of(rule, 1, 2)
    assert second.ranges(0) == [slice(2, 4), slice(5, 6), slice(7, 8)]
    assert take(merge(rule, [together], 1, 2), second, 0).flatten().tolist() == [3, 4, 20, 200]


def test_output_projections_are_cut_by_columns() -> None:
    rule = rule_named(PLAIN, "layers.0.mlp.linear_fc2.weight")
    assert cut(rule, [torch.arange(8.0).reshape(2, 4)], 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_vocabulary_is_padded_with_zeros() -> None:
    rule = rule_named(replace(PLAIN, hidden_size=1, vocab_size=3), "word_embeddings.weight")
    weight = torch.tensor([[1.0], [2.0], [3.0]])
    assert cut(rule, [weight], 2) == [[1, 2], [3, 0]]
    [(name, tensor)] = split(rule, [merge(rule, [weight], index, 2) for index in range(2)])
    assert (name, tensor.flatten().tolist()) == ("model.embed_tokens.weight", [1, 2, 3])


def test_neighbouring_rows_are_not_copied() -> None:
    rule = rule_named(PLAIN, "layers.0.mlp.linear_fc1.weight")
    held = torch.randn(part_of(rule, 1, 2).shape)
    assert take(held, part_of(rule, 1, 2), 1).data_ptr() == held[2:].data_ptr()
