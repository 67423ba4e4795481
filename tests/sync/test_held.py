"""What a server's ranks hold of HF's tensors: by hand for small models, and nothing lost or twice for all families."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from megarl.models.config import ModelConfig
from megarl.models.families import FAMILIES
from megarl.models.hf_config import parse_model_config
from megarl.models.rules import expected_tensors
from megarl.sync.held import Held, held_by
from megarl.sync.held_piece import Piece
from tests.support.tiny import CONFIGS, tiny_config


def model(family: str, **overrides: object) -> ModelConfig:
    [architecture] = [name for name, each in FAMILIES.items() if each.name == family]
    raw = {**tiny_config(family, **overrides).to_dict(), "architectures": [architecture]}
    return parse_model_config(raw, Path("config.json"))


def by_name(found: list[Held]) -> dict[tuple[int, str], Held]:
    return {(held.rank, held.name.removeprefix("model.layers.0.")): held for held in found}


def test_queries_keys_and_values_stand_in_one_tensor_of_each_rank() -> None:
    held = by_name(held_by(model("qwen2"), 2, pads=False))
    # 4 heads of 16 and 2 of keys and values: a rank has 32 rows of queries and 16 of the others.
    for kind in ("weight", "bias"):
        names = [f"model.layers.0.self_attn.{each}_proj.{kind}" for each in "qkv"]
        assert held[1, f"self_attn.qkv_proj.{kind}"].pieces == (
            Piece(names[0], 32, 64),
            Piece(names[1], 16, 32),
            Piece(names[2], 16, 32),
        )
    assert held[1, "self_attn.o_proj.weight"].pieces == (
        Piece("model.layers.0.self_attn.o_proj.weight", 0, 64, (32, 64)),
    )
    assert held[1, "mlp.gate_up_proj.weight"].pieces == (
        Piece("model.layers.0.mlp.gate_proj.weight", 64, 128),
        Piece("model.layers.0.mlp.up_proj.weight", 64, 128),
    )
    assert held[0, "input_layernorm.weight"].pieces == held[1, "input_layernorm.weight"].pieces


def test_a_vocabulary_is_filled_up_to_64_and_gemmas_is_whole() -> None:
    name = "model.embed_tokens.weight"
    held = by_name(held_by(model("qwen3", vocab_size=130), 2, pads=False))
    assert held[0, name].pieces == (Piece(name, 0, 96),)
    assert held[1, name].pieces == (Piece(name, 96, 130, below=62),)
    held = by_name(held_by(model("gemma3", vocab_size=130), 2, pads=True))
    assert held[0, name].pieces == held[1, name].pieces == (Piece(name, 0, 130),)
    assert (0, "lm_head.weight") not in held


def test_keys_that_are_values_too_stand_in_both_places() -> None:
    name = "model.layers.2.self_attn."
    held = {(each.rank, each.name): each for each in held_by(model("gemma4"), 2, pads=False)}
    # 4 heads of 24, and one of keys for both ranks; in layers with a window, of 16, and two.
    assert held[1, f"{name}qkv_proj.weight"].pieces == (
        Piece(f"{name}q_proj.weight", 48, 96),
        Piece(f"{name}k_proj.weight", 0, 24),
        Piece(f"{name}k_proj.weight", 0, 24),
    )
    name = "model.layers.1.self_attn."
    assert held[1, f"{name}qkv_proj.weight"].pieces == (
        Piece(f"{name}q_proj.weight", 32, 64),
        Piece(f"{name}k_proj.weight", 16, 32),
        Piece(f"{name}v_proj.weight", 16, 32),
    )
    assert held[1, "model.layers.1.layer_scalar"].pieces == (Piece("model.layers.1.layer_scalar", 0, 1),)


def test_fewer_heads_than_ranks_are_repeated_or_filled_up() -> None:
    config, name = model("llama", num_key_value_heads=2), "model.layers.0.self_attn."
    repeated = by_name(held_by(config, 4, pads=False))
    assert repeated[1, "self_attn.qkv_proj.weight"].pieces[1] == Piece(f"{name}k_proj.weight", 0, 16)
    assert repeated[2, "self_attn.qkv_proj.weight"].pieces[1] == Piece(f"{name}k_proj.weight", 16, 32)
    filled = by_name(held_by(config, 4, pads=True))
    # 4 heads of keys, and 8 of queries: two for each rank, of which the last two ranks have none.
    assert filled[1, "self_attn.qkv_proj.weight"].pieces[:2] == (
        Piece(f"{name}q_proj.weight", 32, 64),
        Piece(f"{name}k_proj.weight", 16, 32),
    )
    assert filled[3, "self_attn.qkv_proj.weight"].pieces[:2] == (
        Piece(f"{name}q_proj.weight", 64, 64, below=32),
        Piece(f"{name}k_proj.weight", 32, 32, below=16),
    )
    assert filled[3, "self_attn.o_proj.weight"].pieces == (Piece(f"{name}o_proj.weight", 0, 64, (64, 64), beside=32),)


def test_experts_stand_in_two_tensors_one_behind_the_other() -> None:
    held = by_name(held_by(model("qwen3_moe", mlp_only_layers=[]), 1, pads=True))
    fused = held[0, "mlp.experts.w13_weight"].pieces
    name = "model.layers.0.mlp.experts."
    # 48 rows are filled up to 64.
    assert fused[:3] == (
        Piece(f"{name}0.gate_proj.weight", 0, 48, below=16),
        Piece(f"{name}0.up_proj.weight", 0, 48, below=16),
        Piece(f"{name}1.gate_proj.weight", 0, 48, below=16),
    )
    assert len(fused) == 16
    assert held[0, "mlp.experts.w2_weight"].pieces[7] == Piece(f"{name}7.down_proj.weight", 0, 64, (0, 48), beside=16)


def test_compressing_projections_of_latent_attention_are_whole_in_one_tensor() -> None:
    held = by_name(held_by(model("deepseek_v3"), 2, pads=True))
    name = "model.layers.0.self_attn."
    assert held[1, "self_attn.fused_qkv_a_proj_with_mqa.weight"].pieces == (
        Piece(f"{name}q_a_proj.weight", 0, 24),
        Piece(f"{name}kv_a_proj_with_mqa.weight", 0, 40),
    )
    assert held[1, "model.layers.1.mlp.gate.e_score_correction_bias"].wide
    # Two shared experts of 48, each filled up to 64.
    assert held[1, "model.layers.1.mlp.shared_experts.down_proj.weight"].pieces[0].columns == (64, 96)


def test_experts_of_one_tensor_have_gate_and_up_by_turns() -> None:
    name = "model.layers.0.mlp.experts."
    held = by_name(held_by(model("gpt_oss"), 2, pads=True))
    # 48 of each, filled up to 64: the first rank has 64 of the 96 rows, the second the rest.
    assert held[0, "mlp.experts.w13_weight"].pieces[3] == Piece(f"{name}gate_up_proj", 0, 64, expert=3)
    assert held[1, "mlp.experts.w13_weight_bias"].pieces[7] == Piece(
        f"{name}gate_up_proj_bias", 64, 96, below=32, expert=7
    )
    assert held[1, "mlp.experts.w2_weight"].pieces[0] == Piece(f"{name}down_proj", 0, 64, (32, 48), beside=16, expert=0)
    assert held[1, "mlp.experts.w2_weight_bias"].pieces[0] == Piece(f"{name}down_proj_bias", 0, 0, below=64, expert=0)
    assert held[0, "mlp.experts.w2_weight_bias"].wide and not held[0, "mlp.experts.w2_weight"].wide


def test_experts_of_one_tensor_have_gate_above_up() -> None:
    name = "model.layers.0.block_sparse_moe."
    held = by_name(held_by(model("granitemoe"), 2, pads=True))
    # 48 of each, filled up to 64, of which the second rank has 16 rows of the fourth expert's gate, and then of its up.
    assert held[1, "block_sparse_moe.experts.w13_weight"].pieces[6:8] == (
        Piece(f"{name}input_linear.weight", 3 * 96 + 32, 3 * 96 + 48, below=16),
        Piece(f"{name}input_linear.weight", 3 * 96 + 80, 3 * 96 + 96, below=16),
    )
    assert held[1, "block_sparse_moe.experts.w2_weight"].pieces[3] == Piece(
        f"{name}output_linear.weight", 3 * 64, 4 * 64, (32, 48), beside=16
    )
    assert (1, "block_sparse_moe.gate.weight") in held


@pytest.mark.parametrize(("family", "tp", "pads"), list(itertools.product(CONFIGS, (1, 2, 4), (False, True))))
def test_the_ranks_together_hold_every_number(family: str, tp: int, pads: bool) -> None:
    config = model(family, **({"mlp_only_layers": []} if family == "qwen3_moe" else {}))
    covered: dict[str, set[tuple[int | None, int, int]]] = {}
    for held in held_by(config, tp, pads=pads):
        for piece in held.pieces:
            columns = range(*piece.columns) if piece.columns else range(-1, 0)
            cells = itertools.product([piece.expert], range(piece.start, piece.stop), columns)
            covered.setdefault(piece.tensor, set()).update(cells)
    for name, shape in expected_tensors(config).items():
        cut = any(each < 0 for *_, each in covered[name])
        experts: list[int | None] = [None]
        if ".experts." in name and family == "gpt_oss":  # one tensor of [experts, in, out]
            experts, shape = list(range(shape[0])), shape[:0:-1]
        shape = shape or (1,)  # of one number without dimensions
        if family == "granitemoe" and len(shape) == 3:  # rows of all experts
            shape = shape[0] * shape[1], shape[2]
        columns = range(-1, 0) if cut else range(shape[1])
        assert covered[name] == set(itertools.product(experts, range(shape[0]), columns)), name
    assert set(covered) == set(expected_tensors(config))
