"""What a server's ranks hold of a vision tower: by hand for small sizes, and nothing lost or twice for published ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megarl.models.hf_config import parse_model_config
from megarl.models.vision_tower import make_tower
from megarl.sync.held_piece import Piece
from megarl.sync.held_tower import TowerServer, engine_name
from tests.support.large_vision import LARGE, write_large_vision

BLOCK = "visual.blocks.1."


def piece(name: str, *shape: int, rank: int, tp: int = 2, heads: int = 2, filled: bool = False) -> list[Piece]:
    return list(TowerServer(tp, heads, filled).pieces(name, shape, rank))


def test_queries_keys_and_values_of_a_rank_stand_one_below_the_other() -> None:
    name = f"{BLOCK}attn.qkv.weight"
    assert engine_name(name) == f"{BLOCK}attn.qkv_proj.weight"
    assert piece(name, 96, 32, rank=1) == [Piece(name, 16, 32), Piece(name, 48, 64), Piece(name, 80, 96)]
    assert piece(name, 96, 32, rank=1) == piece(name, 96, 32, rank=1, filled=True)
    # Two heads of 16 for four ranks: on a CPU the last two have none.
    assert piece(name, 96, 32, rank=3, tp=4, filled=True)[1] == Piece(name, 64, 64, below=16)
    name = f"{BLOCK}attn.proj.weight"
    assert piece(name, 32, 32, rank=3, tp=4, filled=True) == [Piece(name, 0, 32, (32, 32), beside=16)]
    assert piece(name.replace("weight", "bias"), 32, rank=1) == [Piece(f"{BLOCK}attn.proj.bias", 0, 32)]


def test_an_mlp_of_odd_width_is_filled_up_to_8_and_on_a_cpu_to_32_for_each_rank() -> None:
    gate, down = f"{BLOCK}mlp.gate_proj.bias", f"{BLOCK}mlp.down_proj.weight"
    assert engine_name(gate) == engine_name(gate.replace("gate", "up")) == f"{BLOCK}mlp.gate_up_proj.bias"
    # As Qwen2.5-VL's 3420.
    assert piece(gate, 44, rank=1) == [Piece(gate, 24, 44, below=4)]
    assert piece(down, 32, 44, rank=1) == [Piece(down, 0, 32, (24, 44), beside=4)]
    assert piece(gate, 44, rank=1, filled=True) == [Piece(gate, 32, 44, below=20)]
    first, second = f"{BLOCK}mlp.linear_fc1.weight", f"{BLOCK}mlp.linear_fc2.weight"
    assert piece(first, 44, 32, rank=1) == [Piece(first, 22, 44)]
    assert piece(second, 32, 44, rank=0, filled=True) == [Piece(second, 0, 32, (0, 32))]
    for filled in (False, True):  # of Qwen2-VL no size is filled up
        assert piece(f"{BLOCK}mlp.fc1.bias", 44, rank=1, filled=filled) == [Piece(f"{BLOCK}mlp.fc1.bias", 22, 44)]


def test_mergers_are_cut_and_positions_are_a_vocabulary() -> None:
    for name in ("visual.merger.mlp.0", "visual.merger.linear_fc1", "visual.deepstack_merger_list.2.linear_fc1"):
        assert piece(f"{name}.bias", 128, rank=1) == [Piece(f"{name}.bias", 64, 128)]
    for name in ("visual.merger.mlp.2", "visual.merger.linear_fc2", "visual.deepstack_merger_list.2.linear_fc2"):
        assert piece(f"{name}.weight", 64, 128, rank=1) == [Piece(f"{name}.weight", 0, 64, (64, 128))]
        assert piece(f"{name}.bias", 64, rank=1) == [Piece(f"{name}.bias", 0, 64)]
    assert piece("visual.pos_embed.weight", 81, 32, rank=1) == [Piece("visual.pos_embed.weight", 64, 81, below=47)]
    for name in ("visual.patch_embed.proj.weight", "visual.merger.norm.weight", f"{BLOCK}norm1.bias"):
        assert piece(name, 32, rank=1) == [Piece(name, 0, 32)]


@pytest.mark.parametrize("name", LARGE)
def test_the_ranks_together_hold_every_number_of_published_towers(name: str, tmp_path: Path) -> None:
    folder = write_large_vision(tmp_path, name)
    vision = parse_model_config(json.loads((folder / "config.json").read_text()), folder / "config.json").vision
    assert vision is not None and vision.tower_heads == 16
    for part, tensor in make_tower(folder, torch.bfloat16, "meta").named_parameters():
        shape, hf = tuple(tensor.shape), f"visual.{part}"
        linear = tensor.dim() == 2 or any(end in part for end in (".qkv.", "fc1.", "gate_proj.", "up_proj.", "mlp.0."))
        for tp in (2, 4, 8):
            server = TowerServer(tp, vision.tower_heads, filled=False)
            by_rank = [list(server.pieces(hf, shape, rank)) for rank in range(tp)]
            if not linear:
                assert by_rank == [[Piece(hf, 0, shape[0])]] * tp
                continue
            cells = [cell for pieces in by_rank for piece in pieces for cell in lines(piece)]
            along = 1 if by_rank[0][0].columns else 0
            assert sorted(cells) == list(range(shape[along])), part


def lines(piece: Piece) -> range:
    """The rows that it has, or the columns."""
    return range(*(piece.columns or (piece.start, piece.stop)))
