"""Which layouts a model can have, and what is offered in the place of one that it cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.core.errors import UserError
from megarl.core.layout import Layout
from megarl.models.config import Delta, Mla, ModelConfig, Moe, Rope
from megarl.models.layout_check import check_layout, check_server_layout, cuts_servers, layout_problems, nearest_layouts

DENSE = ModelConfig(
    family="any",
    architecture="any",
    num_layers=4,
    hidden_size=64,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=96,
    vocab_size=101,
    max_positions=128,
    rope=Rope(1e4),
    norm_eps=1e-6,
    tied_embeddings=False,
    qkv_bias=False,
    qk_norm=False,
    eos_token_ids=(),
)
EXPERTS = replace(DENSE, moe=Moe(num_experts=6, top_k=2, ffn_hidden_size=32), moe_layers=frozenset(range(4)))
WHOLE = replace(DENSE, qk_norm=True, whole_qk_norm=True)
LINEAR = replace(DENSE, delta=Delta(4, 8, 16, 16, 4), linear_layers=frozenset({0, 1, 2}), output_gate=True)
LATENT = replace(DENSE, mla=Mla(q_rank=24, kv_rank=14, nope_dim=8, rope_dim=4, v_dim=8), num_kv_heads=8)


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (DENSE, Layout(tp=2, sequence_parallel=True, pp=2, world_size=8)),
        (DENSE, Layout(tp=4, world_size=4)),  # two key-value heads on four ranks
        (WHOLE, Layout(tp=2, world_size=2)),
        (DENSE, Layout(pp=2, vpp=2, world_size=2)),
        (DENSE, Layout(pp=2, first_stage_layers=1, world_size=2)),
        (EXPERTS, Layout(ep=3, world_size=3)),
        (EXPERTS, Layout(tp=2, sequence_parallel=True, etp=2, ep=2, world_size=4)),
        (LATENT, Layout(tp=2, world_size=2)),
        (LINEAR, Layout(tp=4, sequence_parallel=True, pp=2, world_size=16)),
    ],
)
def test_layouts_that_work(config: ModelConfig, layout: Layout) -> None:
    assert layout_problems(config, layout) == []
    check_layout(config, layout, "actor.parallel")


@pytest.mark.parametrize(
    ("config", "layout", "message"),
    [
        (DENSE, Layout(tp=3, world_size=3), "tp 3 does not divide 8 attention heads, 2 key-value heads"),
        (LINEAR, Layout(tp=8, world_size=8), "tp 8 does not divide 4 key heads of linear attention"),
        (
            LINEAR,
            Layout(cp=2, world_size=2),
            "cp 2 would cut sequences, through which the state of its linear attention",
        ),
        (replace(DENSE, ffn_hidden_size=90), Layout(tp=4, world_size=4), "90 MLP columns"),
        (replace(DENSE, num_heads=3, num_kv_heads=1, head_dim=1), Layout(tp=3, world_size=3), "5 rows of queries"),
        (DENSE, Layout(pp=3, world_size=3), "4 layers cannot be assigned to 3 pipeline ranks"),
        (DENSE, Layout(ep=2, world_size=2), "ep 2 is for experts, and the model has none"),
        (EXPERTS, Layout(ep=4, world_size=4), "ep 4 does not divide 6 experts"),
        (EXPERTS, Layout(tp=2, world_size=2), "experts under tp need sequence_parallel: true"),
        (replace(EXPERTS, moe=Moe(6, 2, 33)), Layout(etp=2, world_size=2), "etp 2 does not divide 33 columns"),
        (WHOLE, Layout(tp=4, world_size=4), "2 key-value heads, over all of which their norm goes"),
        (LATENT, Layout(tp=4, world_size=4), "18 compressed key-value columns"),
    ],
)
def test_layouts_that_cannot_be_name_the_numbers(config: ModelConfig, layout: Layout, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        check_layout(config, layout, "actor.parallel")
    assert str(error.value).startswith("actor.parallel (")
    assert "Nearest layouts that work: " in str(error.value)


def test_the_nearest_layouts_work_and_come_first() -> None:
    options = nearest_layouts(DENSE, Layout(pp=8, world_size=8))
    assert len(options) == 3
    assert all(layout_problems(DENSE, option) == [] and option.world_size == 8 for option in options)
    assert options[0] == Layout(pp=4, world_size=8)


def test_an_uneven_stage_is_evened_out() -> None:
    layout = Layout(pp=2, first_stage_layers=4, world_size=2)
    with pytest.raises(UserError, match="Nearest layouts that work: pp2;"):
        check_layout(DENSE, layout, "actor.parallel")


def test_servers_repeat_no_heads_that_are_normed_together() -> None:
    check_server_layout(DENSE, 4)  # two key-value heads on four ranks
    check_server_layout(WHOLE, 2)
    with pytest.raises(UserError, match=r"rollout\.tp 4 does not divide .*Sizes that work: 1, 2\."):
        check_server_layout(WHOLE, 4)
    for family in ("smollm3", "seed_oss"):  # which SGLang serves by transformers' code
        with pytest.raises(UserError, match=r"Sizes that work: 1, 2\."):
            check_server_layout(replace(DENSE, family=family), 4)
    olmoe = replace(WHOLE, family="olmoe", architecture="OlmoeForCausalLM")
    check_server_layout(olmoe, 1)
    with pytest.raises(UserError, match=r"rollout\.tp 2: SGLang serves OlmoeForCausalLM on one device alone"):
        check_server_layout(olmoe, 2)
    assert [tp for tp in (1, 2, 4) if cuts_servers(olmoe, tp)] == [1]


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "granitemoe", "exaone4"])
def test_servers_on_a_cpu_that_would_make_heads_narrower_are_refused(family: str) -> None:
    """SGLang 0.5.21 fills the two key-value heads up to four, and eight heads to sixteen, each half as wide."""
    config = replace(DENSE, family=family, architecture="AnyForCausalLM")
    check_server_layout(config, 4)
    check_server_layout(config, 2, pads=True)
    check_server_layout(replace(DENSE, family="granite"), 4, pads=True)
    with pytest.raises(
        UserError, match=r"^--tp 4: the model has 2 key-value heads, and on a CPU .* Sizes that work: 1, 2\."
    ):
        check_server_layout(config, 4, "--tp", pads=True)
    assert [tp for tp in (1, 2, 4) if cuts_servers(config, tp, pads=True)] == [1, 2]


def test_servers_cut_linear_attention_by_its_key_heads() -> None:
    check_server_layout(LINEAR, 4)
    with pytest.raises(UserError, match=r"rollout\.tp 8 does not divide the model.* Sizes that work: 1, 2, 4\."):
        check_server_layout(LINEAR, 8)
