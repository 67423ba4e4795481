"""A vision tower that learns: its state on disk and in memory, and what passes see of it. Gradients: test_image_features."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from megarl.convert.text_part import into_multimodal, text_part
from megarl.core.errors import UserError
from megarl.core.types import MiniBatch, Shard
from megarl.models.hf_config import load_model_config
from megarl.models.hf_dtypes import ModelDtype
from megarl.models.tower_files import tower_index, with_tower
from megarl.models.vision import Vision, png_size
from megarl.models.vision_tower import Tower, make_tower
from megarl.training.manifest import CARRIED, HF_FOLDER, read_saved_config
from megarl.training.rank import Rank
from megarl.training.spec import RoleSpec
from tests.support.tolerances import Tolerance
from tests.support.vision import QWEN2_5, QWEN3, QWEN3_5_MOE, write_tiny_vision_model
from tests.training.harness import OPTIMIZER, assert_same, weights, written
from tests.training.seeing import Pictured, pictured, pictured_shards, reference, seeing_spec, some_pictured
from tests.training.seeing_ranks import gradients

LEARNING = OPTIMIZER.model_copy(update={"freeze_vision_tower": False})
# With names as they are published, and as transformers has them; features behind layers, and windows; experts in one tensor.
ARCHITECTURES = [QWEN2_5, QWEN3, QWEN3_5_MOE]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("learning")
    return {name: write_tiny_vision_model(root / name, name, published=name == QWEN2_5) for name in ARCHITECTURES}


def seen_by(folder: Path) -> Vision:
    vision = load_model_config(folder).vision
    assert vision is not None
    return vision


def learning(folder: Path, **others: object) -> RoleSpec:
    return replace(seeing_spec(folder), optimizer=LEARNING, **others)  # type: ignore[arg-type]


def shard_of(folder: Path, made: list[Pictured] | None = None) -> Shard:
    [shard] = pictured_shards(made or some_pictured(seen_by(folder)))
    return shard


def scored(rank: Rank, shard: Shard) -> np.ndarray:
    return np.concatenate([each for mini in rank.logprobs("actor", shard) or [] for each in mini])


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "waits"), [("float32", True), ("bfloat16", False)])
def test_a_resumed_tower_learns_the_very_same(
    rank: Rank, folders: dict[str, Path], architecture: str, tmp_path: Path, dtype: ModelDtype, waits: bool
) -> None:
    folder = folders[architecture]
    shard, spec = shard_of(folder), learning(folder, dtype=dtype)
    rank.build("actor", spec)
    for _ in range(2):
        rank.update("actor", shard, {})
    before = weights(rank, "actor")
    assert_same(written(rank, "actor"), before)
    rank.save("actor", tmp_path, wait=waits)
    rank.update("actor", shard, {})
    further = weights(rank, "actor")
    rank.finish_save("actor")
    rank.build("actor", spec)
    scored(rank, shard)  # what is kept of images goes as the checkpoint is read
    rank.load("actor", tmp_path)
    assert_same(weights(rank, "actor"), before)
    rank.update("actor", shard, {})
    assert_same(weights(rank, "actor"), further)
    names = {f"visual.{part}" for part, _ in with_tower(load_model_config(folder), folder).vision.tower}
    assert names <= further.keys()
    same = {name for name in names if torch.equal(before[name], further[name])}
    assert same < names if dtype == "bfloat16" else not same, "a small step may round to none"
    assert not (tmp_path / HF_FOLDER / CARRIED).exists()
    assert read_saved_config(tmp_path / HF_FOLDER) == with_tower(load_model_config(folder), folder)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_was_trained_and_written_is_what_transformers_loads(
    rank: Rank, folders: dict[str, Path], architecture: str, tmp_path: Path, bounds: Tolerance
) -> None:
    folder, target = folders[architecture], tmp_path / "written"
    made = some_pictured(seen_by(folder))
    rank.build("actor", learning(folder))
    begun = scored(rank, shard_of(folder))
    for _ in range(2):
        rank.update("actor", shard_of(folder), {})
    after = scored(rank, shard_of(folder))
    rank.export_hf("actor", folder, target)
    expected = torch.cat(reference(target, seen_by(folder), made)[0]).numpy()
    assert np.abs(after - expected).max() < bounds.logprob < np.abs(after - begun).max()
    before, found = stored(folder), stored(target)
    assert {name: (each.shape, each.dtype) for name, each in found.items()} == {
        name: (each.shape, each.dtype) for name, each in before.items()
    }
    assert {name for name in tower_index(folder) if torch.equal(before[name], found[name])} == set()
    text, again = tmp_path / "text", tmp_path / "again"
    text_part(target, text, force=False, console=Console(quiet=True))
    into_multimodal(text, target, again, force=False, console=Console(quiet=True))
    assert_same(stored(again), found)
    rank.build("actor", seeing_spec(target))
    assert np.abs(scored(rank, shard_of(folder)) - after).max() < bounds.logprob


def test_a_tower_that_learned_is_not_left_out_of_what_is_frozen_nor_the_other_way(
    rank: Rank, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = folders[QWEN2_5]
    specs = {"learned": learning(folder), "frozen": replace(seeing_spec(folder), optimizer=OPTIMIZER)}
    for name, spec in specs.items():
        (tmp_path / name).mkdir()
        rank.build("actor", spec)
        rank.save("actor", tmp_path / name)
    with pytest.raises(UserError, match=r"holds weights of a vision tower that learned, and the model's is frozen"):
        rank.load("actor", tmp_path / "learned")
    rank.build("actor", specs["learned"])
    with pytest.raises(UserError, match=r"holds no weights of a vision tower: it was frozen, and the model's learns"):
        rank.load("actor", tmp_path / "frozen")
    rank.load("actor", tmp_path / "learned")


@contextmanager
def kept_bytes() -> Iterator[list[int]]:
    """What backward keeps of what is computed within, but for parameters: its bytes, as the only entry behind the block."""
    found: dict[int, int] = {}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    total: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total
    total.append(sum(found.values()))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_blocks_are_computed_again_with_the_same_numbers_and_less_memory(
    rank: Rank, folders: dict[str, Path], architecture: str, tmp_path: Path
) -> None:
    """Memory: what backward keeps of one image grows with each layer by what a layer is given, and no more."""
    folder = folders[architecture]
    picture = some_pictured(seen_by(folder))[0].images[0]
    found = {}
    for recompute in ("none", "full"):
        rank.build("actor", seeing_spec(folder, tower=True, recompute=recompute))
        tower = rank.engine("actor")._images._tower
        rank.update("actor", shard_of(folder), {})
        found[recompute] = gradients(rank, "actor")
        assert tower.module.training
        learned = tower.see(picture)
        tower.module.eval()
        assert torch.equal(tower.see(picture), learned), "nothing is dropped in training"
    assert_same(found["full"], found["none"])
    raw = json.loads((folder / "config.json").read_text())
    held: dict[tuple[bool, int], int] = {}
    for depth in (4, 12):
        (tmp_path / "config.json").write_text(
            json.dumps(raw | {"vision_config": raw["vision_config"] | {"depth": depth}})
        )
        for recomputed in (False, True):
            module = make_tower(tmp_path, torch.float32, "cpu", recomputed=recomputed).train()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.normal_(std=0.02)
            with kept_bytes() as total:
                Tower(module, folder, torch.float32, "cpu").see(picture)
            held[recomputed, depth] = total[0]
    patches = 4 * seen_by(folder).num_tokens(*png_size(picture))
    assert held[True, 12] - held[True, 4] == 8 * patches * 32 * 4
    assert held[False, 12] - held[False, 4] > 8 * (held[True, 12] - held[True, 4])


def test_bfloat16_sees_what_a_frozen_tower_does_to_the_bit(rank: Rank, folders: dict[str, Path]) -> None:
    for folder in folders.values():
        towers, found = {}, {}
        for name, spec in {"frozen": seeing_spec(folder), "learns": learning(folder)}.items():
            rank.build("actor", replace(spec, dtype="bfloat16"))
            found[name] = scored(rank, shard_of(folder))
            towers[name] = rank.engine("actor")._images._tower
        picture = some_pictured(seen_by(folder))[0].images[0]
        assert towers["learns"].features(picture).dtype == torch.bfloat16
        assert torch.equal(towers["learns"].features(picture), towers["frozen"].features(picture))
        assert np.array_equal(found["learns"], found["frozen"])
        buffers = dict(towers["learns"].module.named_buffers())
        assert buffers.keys() == dict(towers["frozen"].module.named_buffers()).keys()
        for name, buffer in towers["frozen"].module.named_buffers():
            assert buffers[name].dtype == torch.float32 and torch.equal(buffers[name], buffer), name
        rank.update("actor", shard_of(folder), {})
        assert not np.array_equal(scored(rank, shard_of(folder)), found["learns"])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_offloaded_role_learns_the_very_same(rank: Rank, folders: dict[str, Path], architecture: str) -> None:
    folder, found = folders[architecture], []
    for offload in ((), ("params", "grads", "optimizer")):
        rank.build("actor", learning(folder, offload=offload))
        said = []
        for _ in range(2):
            said.append(scored(rank, shard_of(folder)))
            rank.update("actor", shard_of(folder), {})
        found.append((said, weights(rank, "actor")))
    (said, whole), (again, slept) = found
    assert all(np.array_equal(one, other) for one, other in zip(said, again, strict=True))
    assert_same(slept, whole)


def test_an_image_of_many_sequences_learns_what_all_ask_of_it(
    rank: Rank, folders: dict[str, Path], bounds: Tolerance
) -> None:
    """In one micro-batch and in several, and twice in a sequence."""
    folder = folders[QWEN3]
    vision = seen_by(folder)
    several, words, *_, last = some_pictured(vision)
    twice = pictured(vision, [3, (2, 2), 4, (2, 2), 7], 5)
    made = [several, last, words, last, replace(twice, images=twice.images[:1] * 2)]
    _, expected = reference(folder, vision, made)
    for count in (1, 2, 5):
        [shard] = pictured_shards(made, micro_batches=count)
        rank.build("actor", seeing_spec(folder, tower=True))
        rank.update("actor", shard, {})
        found = gradients(rank, "actor")
        apart = {name: float((found[name] - expected[name]).abs().max() / expected[name].abs().max()) for name in found}
        assert {name: each for name, each in apart.items() if not each < bounds.gradient} == {}


def test_biases_and_norms_of_a_tower_have_no_weight_decay(rank: Rank, folders: dict[str, Path]) -> None:
    for folder in folders.values():
        rank.build("actor", learning(folder))
        engine = rank.engine("actor")
        tower = {id(each): (name, each) for name, each in engine._chunks[0].vision_tower.named_parameters()}
        decayed = {}
        for member in engine._stepper.optimizer.chained_optimizers:
            groups = zip(member.model_fp32_groups, member.optimizer.param_groups, strict=True)
            for models, group in groups:
                decayed |= {tower[id(each)][0]: group["wd_mult"] for each in models if id(each) in tower}
        assert len(decayed) == len(tower)
        assert {name: bool(rate) for name, rate in decayed.items()} == {
            name: each.dim() > 1 for name, each in tower.values()
        }


def test_every_mini_batch_sees_the_tower_as_it_is_by_then(rank: Rank, folders: dict[str, Path]) -> None:
    """Also behind one of text alone, and behind one of nothing at all: other ranks may have learned of images meanwhile."""
    folder = folders[QWEN2_5]
    made = some_pictured(seen_by(folder))
    every, text, last = (shard_of(folder, each).mini_batches[0] for each in (made, made[1:2], made[2:]))
    nothing, found = MiniBatch(()), []
    for steps in ([(every, text, every, nothing, last)], [(every,), (text,), (every,), (nothing, last)]):
        rank.build("actor", learning(folder))
        for minis in steps:
            before = scored(rank, shard_of(folder))  # what is kept of images goes
            rank.update("actor", Shard(minis), {})
            after = scored(rank, shard_of(folder))
            rank.engine("actor")._images.forget()
            assert np.array_equal(scored(rank, shard_of(folder)), after) and not np.array_equal(after, before)
        found.append(weights(rank, "actor"))
    assert_same(*found)
