"""What is not trained, through a rank's exports and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.core.errors import UserError
from megarl.recipe.roles import Lora
from megarl.training.manifest import CARRIED, HF_FOLDER
from megarl.training.rank import Rank
from tests.support.further import add_further, same_bytes, stored
from tests.support.tiny import write_tiny_model
from tests.training.harness import VOCAB, actor_spec
from tests.training.samples import examples, shards


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "source", "qwen3", vocab_size=VOCAB, num_hidden_layers=2)


@pytest.mark.parametrize("lora", [None, Lora(rank=4, alpha=8, targets=("linear_qkv", "linear_fc1"))])
def test_a_trained_export_has_them_to_the_byte(lora: Lora | None, rank: Rank, folder: Path, tmp_path: Path) -> None:
    names = add_further(folder, "qwen3", dtype=torch.bfloat16)
    before = stored(folder)
    rank.build("actor", replace(actor_spec(folder), lora=lora))
    [shard], [columns] = shards([examples([9, 6], VOCAB)])
    for _ in range(2):
        rank.update("actor", shard, columns)
    rank.export_hf("actor", folder, tmp_path / "hf")
    after = stored(tmp_path / "hf")
    assert after.keys() == before.keys()
    assert same_bytes(*({name: each[name] for name in names} for each in (after, before)))
    assert not torch.equal(after["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])
    (tmp_path / "mcore").mkdir()
    rank.save("actor", tmp_path / "mcore")
    assert (tmp_path / "mcore" / HF_FOLDER / CARRIED).exists()
    rank.export_hf("actor", tmp_path / "mcore" / HF_FOLDER, tmp_path / "again")
    assert same_bytes(stored(tmp_path / "again"), after)


def test_a_critic_leaves_them_behind(rank: Rank, folder: Path, tmp_path: Path) -> None:
    names = add_further(folder, "qwen3")
    rank.build("critic", replace(actor_spec(folder), head="score", objective=None, optimizer=None))
    (tmp_path / "mcore").mkdir()
    rank.save("critic", tmp_path / "mcore")
    assert not (tmp_path / "mcore" / HF_FOLDER / CARRIED).exists()
    rank.export_hf("critic", folder, tmp_path / "hf")
    assert not names & stored(tmp_path / "hf").keys()


def test_a_source_that_is_gone_is_told_as_a_checkpoint_is_written(rank: Rank, folder: Path, tmp_path: Path) -> None:
    add_further(folder, "qwen3")
    rank.build("actor", actor_spec(folder))
    (folder / "model.safetensors").write_bytes(b"cut")
    (tmp_path / "mcore").mkdir()
    with pytest.raises(UserError, match=r"could not be written to .*model\.safetensors"):
        rank.save("actor", tmp_path / "mcore")


def test_a_model_with_nothing_to_carry_needs_its_sources_weights_once(rank: Rank, folder: Path, tmp_path: Path) -> None:
    """They may lie in a cache that is cleared meanwhile."""
    rank.build("actor", actor_spec(folder))
    (folder / "model.safetensors").unlink()
    (tmp_path / "mcore").mkdir()
    rank.save("actor", tmp_path / "mcore")
    assert not (tmp_path / "mcore" / HF_FOLDER / CARRIED).exists()
    rank.export_hf("actor", folder, tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").exists()


def test_layers_whose_file_is_gone_are_not_left_out_in_silence(rank: Rank, folder: Path, tmp_path: Path) -> None:
    add_further(folder, "qwen3")
    rank.build("actor", actor_spec(folder))
    (folder / "model.safetensors").unlink()
    (tmp_path / "mcore").mkdir()
    with pytest.raises(UserError, match=r"could not be written to .*model\.safetensors"):
        rank.save("actor", tmp_path / "mcore")
