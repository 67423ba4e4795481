"""Every row is held by exactly one rank of the first copy, at any layout; and who holds what, by hand."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings

from megarl.core.layout import Layout, place
from megarl.models.config import ModelConfig, Moe
from megarl.models.parts import Dealing, Part, first_copy, part_of
from megarl.models.rules import Rule, rules
from tests.models.configs import PLAIN, cases


def rule_named(config: ModelConfig, end: str) -> Rule:
    return next(rule for rule in rules(config, "torch") if rule.megatron.endswith(end))


def rows(part: Part, source: int) -> list[int]:
    return [row for run in part.runs if run.source == source for row in range(run.start, run.stop)]


@settings(deadline=None, max_examples=50)
@given(case=cases())
def test_parts_of_a_tensor_are_the_tensor(case: tuple[ModelConfig, Layout]) -> None:
    config, layout = case
    dealing = Dealing(config, layout)
    copy = set(first_copy(layout))
    for rule in rules(config, "torch"):
        holders = dealing.holders(rule)
        assert copy.issuperset(holders)
        parts = [dealing.part(rule, place(holder, layout)) for holder in holders]
        assert len({part.shape for part in parts}) == 1, "every rank holds as much"
        for index, source in enumerate(rule.sources):
            held = [rows(part, index) for part in parts]
            for part, each in zip(parts, held, strict=True):
                assert [row for where in part.ranges(index) for row in range(where.start, where.stop)] == sorted(each)
                assert len(part.ranges(index)) <= len(source.blocks), "one range of each tensor that it is"
            if rule.cut == "columns":
                columns = [column for part in parts for column in range(*part.columns.indices(source.shape[1]))]
                assert columns == list(range(source.shape[1]))
                assert all(each == list(range(source.shape[0])) for each in held)
            else:
                taken = [row for each in held for row in each]
                assert (sorted(taken) if source.pieces else taken) == list(range(source.shape[0]))
        assert sum(part.padding for part in parts) == len(parts) * parts[0].shape[0] - sum(
            len(rows(part, index)) for part in parts for index in range(len(rule.sources))
        )


@settings(deadline=None, max_examples=30)
@given(case=cases())
def test_every_copy_of_the_model_is_whole(case: tuple[ModelConfig, Layout]) -> None:
    config, layout = case
    dealing = Dealing(config, layout)
    for rule in rules(config, "torch"):
        held = [rank for rank in range(layout.world_size) if dealing.is_held(rule, place(rank, layout))]
        holders = dealing.holders(rule)
        assert set(holders) <= set(held)
        copies = layout.dp * layout.cp if rule.expert is None else layout.edp
        wanted = len(holders) * copies * (layout.tp if rule.expert is None and rule.cut == "whole" else 1)
        assert len(held) == wanted
        parts = [dealing.part(rule, place(rank, layout)) for rank in holders]
        assert all(dealing.part(rule, place(rank, layout)) in parts for rank in held)


def test_ranks_cut_through_a_group_of_heads() -> None:
    # One key-value head of two rows, two query heads: rows are q q q q k k v v.
    config = replace(PLAIN, num_heads=2, num_kv_heads=1, head_dim=2)
    rule = rule_named(config, "layers.0.self_attention.linear_qkv.weight")
    first, second = part_of(rule, 0, 2), part_of(rule, 1, 2)
    assert [rows(first, source) for source in range(3)] == [[0, 1, 2, 3], [], []]
    assert [rows(second, source) for source in range(3)] == [[], [0, 1], [0, 1]]
    assert first.shape == second.shape == (4, 2)


def test_a_rank_may_hold_the_end_of_one_group_and_no_more() -> None:
    # Two groups of q q k v over four ranks: two rows each.
    config = replace(PLAIN, num_heads=4, num_kv_heads=2)
    rule = rule_named(config, "layers.0.self_attention.linear_qkv.weight")
    held = [[rows(part_of(rule, rank, 4), source) for source in range(3)] for rank in range(4)]
    assert held == [[[0, 1], [], []], [[], [0], [0]], [[2, 3], [], []], [[], [1], [1]]]


def test_the_last_rank_holds_the_padding_of_the_vocabulary() -> None:
    rule = rule_named(replace(PLAIN, vocab_size=5), "word_embeddings.weight")
    parts = [part_of(rule, rank, 4) for rank in range(4)]
    assert [rows(part, 0) for part in parts] == [[0, 1], [2, 3], [4], []]
    assert [part.padding for part in parts] == [0, 0, 1, 2]


def test_experts_live_on_axes_of_their_own() -> None:
    moe = Moe(num_experts=4, top_k=1, ffn_hidden_size=2)
    config = replace(PLAIN, moe=moe, moe_layers=frozenset({0, 1}))
    layout = Layout(tp=2, pp=2, ep=2, etp=2, sequence_parallel=True, world_size=8)
    dealing = Dealing(config, layout)
    assert dealing.holders(rule_named(config, "layers.0.mlp.experts.local_experts.1.linear_fc1.weight")) == [0, 1]
    assert dealing.holders(rule_named(config, "layers.0.mlp.experts.local_experts.2.linear_fc1.weight")) == [2, 3]
    assert dealing.holders(rule_named(config, "layers.1.mlp.experts.local_experts.3.linear_fc2.weight")) == [6, 7]
    assert dealing.holders(rule_named(config, "layers.1.mlp.router.weight")) == [4]
    assert dealing.holders(rule_named(config, "layers.1.self_attention.linear_qkv.weight")) == [4, 5]
    assert dealing.holders(rule_named(config, "word_embeddings.weight")) == [0, 1]
    assert dealing.holders(rule_named(config, "final_layernorm.weight")) == [4]
    assert dealing.holders(rule_named(config, "output_layer.weight")) == [4, 5]
