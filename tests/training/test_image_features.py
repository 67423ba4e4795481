"""A model that sees images: what transformers computes with its own, at every layout."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from megarl.convert.text_part import text_part
from megarl.core.errors import MegarlError
from megarl.core.ports import free_port
from megarl.core.types import MiniBatch, Shard
from megarl.models.hf_config import load_model_config
from megarl.models.tower_files import tower_index
from megarl.models.vision import Vision
from megarl.recipe.roles import Lora
from megarl.training.manifest import HF_FOLDER, read_model_config
from megarl.training.rank import Rank
from megarl.training.spec import ValueObjective
from tests.support.forked_ranks import Ranks
from tests.support.tolerances import Tolerance
from tests.support.vision import (
    QWEN2,
    QWEN2_5,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
    png,
    with_score,
    write_tiny_vision_model,
)
from tests.training.harness import OPTIMIZER
from tests.training.seeing import (
    Pictured,
    of_text,
    paired_shards,
    pictured_shards,
    preferred,
    reference,
    scored_reference,
    seeing_spec,
    some_pictured,
    transformers_logits,
    transformers_model,
)
from tests.training.seeing_ranks import CASES, MICRO_BATCHES, PAIRED, cases_of, trains_tower
from tests.training.test_roles import chosen_by, routed

ARCHITECTURES = [QWEN2, QWEN2_5, QWEN3, QWEN3_MOE, QWEN3_5, QWEN3_5_MOE]
DELTA = (QWEN3_5, QWEN3_5_MOE)
# Of which pairs and critics are tried over ranks as well.
OVER_RANKS = [each for each in ARCHITECTURES if {*PAIRED} <= {*cases_of(each)}]
Reference = tuple[list[Tensor], dict[str, Tensor]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each architecture."""
    root = tmp_path_factory.mktemp("seeing")
    found = {name: write_tiny_vision_model(root / name, name) for name in ARCHITECTURES}
    for folder in found.values():
        with_score(folder, root / "new").rename(folder / "scored")
    return found


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, Reference]:
    """What transformers computes of each."""
    return {
        name: reference(folder, seen_by(folder), some_pictured(seen_by(folder))) for name, folder in folders.items()
    }


@pytest.fixture(scope="module")
def measured(folders: dict[str, Path], ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ranks of several layouts have left what they computed."""
    target = tmp_path_factory.mktemp("measured")
    for size in sorted({layout.world_size for layout, _ in CASES.values()}):
        words = (size, free_port("127.0.0.1"), target, *folders.values())
        assert ranks.run("tests.training.seeing_ranks", size, *words, log=target / f"ranks{size}.log") == ""
    return target


def seen_by(folder: Path) -> Vision:
    vision = load_model_config(folder).vision
    assert vision is not None
    return vision


def wider(bounds: Tolerance, architecture: str) -> Tolerance:
    """Gradients of transformers' Gated DeltaNet are themselves up to 1e-4 from those in float64, and log-probs 1e-5."""
    times = 5 if architecture in DELTA else 1
    return replace(bounds, logprob=times * bounds.logprob, gradient=times * bounds.gradient)


def assert_gradients(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], bounds: Tolerance) -> None:
    assert found.keys() == expected.keys()
    apart = {name: (found[name] - expected[name]).abs().max() / expected[name].abs().max() for name in found}
    assert {name: each for name, each in apart.items() if not each < bounds.gradient} == {}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_and_gradients_equal_transformers(
    rank: Rank, folders: dict[str, Path], references: dict[str, Reference], architecture: str, bounds: Tolerance
) -> None:
    """Those of words in a sequence with images, too, and not only near them: none depends on another's images."""
    folder, (logprobs, gradients) = folders[architecture], references[architecture]
    rank.build("actor", seeing_spec(folder, tower=True))
    [shard] = pictured_shards(some_pictured(seen_by(folder)))
    [[column]] = rank.logprobs("actor", shard) or []
    assert np.abs(column - torch.cat(logprobs).numpy()).max() < bounds.logprob
    rank.update("actor", shard, {})
    found = {name: tensor.cpu() for bucket in rank.engine("actor").gradients(1 << 16) for name, tensor in bucket}
    assert_gradients(found, gradients, wider(bounds, architecture))


@pytest.mark.parametrize(("architecture", "case"), [(each, case) for each in ARCHITECTURES for case in cases_of(each)])
def test_every_layout_computes_what_transformers_does(
    measured: Path, references: dict[str, Reference], architecture: str, case: str, bounds: Tolerance
) -> None:
    found = torch.load(measured / f"{architecture} {case}.pt", weights_only=False)
    logprobs, gradients = references[architecture]
    dp = cases_of(architecture)[case][0].dp
    expected = [[[*logprobs[index::dp][first::MICRO_BATCHES]] for first in range(MICRO_BATCHES)] for index in range(dp)]
    for [columns], cuts in zip(found["logprobs"], expected, strict=True):
        for column, cut in zip(columns, cuts, strict=True):
            assert np.abs(column - torch.cat(cut).numpy()).max() < bounds.logprob
    gradients = gradients if trains_tower(architecture, case) else of_text(gradients)
    assert_gradients(found["gradients"], gradients, wider(bounds, architecture))


@pytest.mark.parametrize("architecture", OVER_RANKS)
def test_pairs_are_compared_over_ranks_as_by_hand(
    measured: Path, folders: dict[str, Path], architecture: str, bounds: Tolerance
) -> None:
    folder = folders[architecture]
    _, expected = reference(folder, seen_by(folder), some_pictured(seen_by(folder)), preferred)
    for case in PAIRED:
        found = torch.load(measured / f"{architecture} {case}.pt", weights_only=False)
        of_case = expected if trains_tower(architecture, case) else of_text(expected)
        assert_gradients(found["paired"], of_case, bounds)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_values_and_their_gradients_are_those_of_transformers_and_a_head(
    rank: Rank, measured: Path, folders: dict[str, Path], architecture: str, bounds: Tolerance
) -> None:
    """Of a critic, on one rank and on several; its weights come back from a checkpoint and from what it exports."""
    folder = folders[architecture] / "scored"
    made = some_pictured(seen_by(folder))
    values, expected = scored_reference(folder, seen_by(folder), made)
    [shard], _ = paired_shards(made)
    rank.build("critic", replace(seeing_spec(folder), objective=ValueObjective(), head="score"))
    [[column]] = rank.values("critic", shard) or []
    assert np.abs(column - torch.cat(values).numpy()).max() < bounds.logprob
    for case in PAIRED if architecture in OVER_RANKS else ():
        found = torch.load(measured / f"{architecture} {case}.pt", weights_only=False)
        of_case = expected if trains_tower(architecture, case) else of_text(expected)
        assert_gradients(found["critic"], of_case, bounds)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_critic_that_begins_as_the_policy_is_read_again(
    rank: Rank, folders: dict[str, Path], architecture: str, tmp_path: Path, bounds: Tolerance
) -> None:
    """From a checkpoint, and from the folder that it leaves, whose text part transformers knows as a classifier."""
    folder = folders[architecture]
    spec = replace(seeing_spec(folder), optimizer=OPTIMIZER, objective=ValueObjective(), head="score")
    [shard], [columns] = paired_shards(some_pictured(seen_by(folder)))
    targets = {"values": columns["ref_logprobs"], "returns": columns["ref_logprobs"]}
    rank.build("critic", spec)
    assert not np.any((rank.values("critic", shard) or [])[0][0]), "its head begins at zero"
    for _ in range(2):
        rank.update("critic", shard, targets)
    [[column]] = rank.values("critic", shard) or []
    assert np.abs(column).max() > 0
    (tmp_path / "checkpoint").mkdir()
    rank.save("critic", tmp_path / "checkpoint")
    rank.export_hf("critic", folder, tmp_path / "hf_critic")
    rank.update("critic", shard, targets)
    [[further]] = rank.values("critic", shard) or []
    rank.build("critic", spec)
    rank.load("critic", tmp_path / "checkpoint")
    rank.update("critic", shard, targets)
    assert np.array_equal((rank.values("critic", shard) or [])[0][0], further), "a resumed critic learns the same"
    config = load_model_config(tmp_path / "hf_critic")
    assert config == load_model_config(folder).with_score_head()
    assert read_model_config(tmp_path / "checkpoint" / HF_FOLDER) == config
    rank.build("again", replace(seeing_spec(tmp_path / "hf_critic"), optimizer=None, objective=None, head="score"))
    # Where a tensor begins in memory may round Gated DeltaNet otherwise.
    apart = bounds.logprob if architecture in DELTA else 0.0
    assert np.abs((rank.values("again", shard) or [])[0][0] - column).max() <= apart
    before, after = stored(folder), stored(tmp_path / "hf_critic")
    assert after.keys() == before.keys() - {"lm_head.weight"} | {"score.weight"}
    text_part(tmp_path / "hf_critic", tmp_path / "text", force=False, console=Console(quiet=True))
    assert torch.equal(stored(tmp_path / "text")["score.weight"], after["score.weight"])
    if architecture != QWEN3_5_MOE:  # which transformers has not as a classifier
        classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "text")
        assert torch.equal(classifier.score.weight, after["score.weight"])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_was_trained_and_written_is_what_transformers_loads(
    rank: Rank, folders: dict[str, Path], architecture: str, tmp_path: Path, bounds: Tolerance
) -> None:
    """Under the names of the folder that it came from, with the tower as it was; and megarl reads it again."""
    folder, target = folders[architecture], tmp_path / "written"
    vision = seen_by(folder)
    made = some_pictured(vision)
    rank.build("actor", replace(seeing_spec(folder), optimizer=OPTIMIZER))
    [shard] = pictured_shards(made)
    rank.update("actor", shard, {})
    [[column]] = rank.logprobs("actor", shard) or []
    rank.export_hf("actor", folder, target)
    assert np.abs(column - torch.cat(reference(target, vision, made)[0]).numpy()).max() < bounds.logprob
    before, after = stored(folder), stored(target)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not {name for name in changed if "visual." in name}
    assert changed >= {
        name for name in before if name.endswith(("q_proj.weight", "down_proj.weight", "experts.down_proj"))
    } - set(tower_index(folder))
    assert load_model_config(target) == load_model_config(folder)
    rank.build("again", seeing_spec(target))
    [[again]] = rank.logprobs("again", shard) or []
    assert np.array_equal(column, again)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_adapters_are_written_for_the_linears_of_the_text_part_alone(
    rank: Rank, folders: dict[str, Path], architecture: str, tmp_path: Path, bounds: Tolerance
) -> None:
    folder, bounds = folders[architecture], wider(bounds, architecture)
    vision = seen_by(folder)
    made = some_pictured(vision)
    dense = () if "Moe" in architecture else ("linear_fc1", "linear_fc2")
    delta = ("linear_in",) if "3_5" in architecture else ()
    lora = Lora(rank=4, alpha=8.0, targets=("linear_qkv", "linear_proj", *dense, *delta))
    rank.build("actor", replace(seeing_spec(folder), optimizer=OPTIMIZER, lora=lora))
    [shard] = pictured_shards(made)
    for _ in range(2):
        rank.update("actor", shard, {})
    [[column]] = rank.logprobs("actor", shard) or []
    rank.export_hf("actor", folder, tmp_path / "merged")
    assert np.abs(column - torch.cat(reference(tmp_path / "merged", vision, made)[0]).numpy()).max() < bounds.logprob
    rank.export_adapters("actor", tmp_path / "adapters")
    model, said = transformers_model(folder), json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    tensors = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    adapted = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors}
    linears = {name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    assert adapted == {name for name in linears if re.fullmatch(said["target_modules"], name)}
    with torch.no_grad():
        for name in adapted:
            down, up = (tensors[f"base_model.model.{name}.lora_{each}.weight"] for each in "AB")
            model.get_submodule(name).weight += said["lora_alpha"] / said["r"] * (up @ down)
        logits = transformers_logits(model, folder, vision, made[0])
    labels = torch.tensor(made[0].example.labels)
    found = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0].numpy()
    assert np.abs(column[: len(found)] - found).max() < bounds.logprob


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_checkpoint_is_read_again_and_has_the_tower(
    rank: Rank, folders: dict[str, Path], architecture: str, tmp_path: Path
) -> None:
    folder = folders[architecture]
    spec = replace(seeing_spec(folder), optimizer=OPTIMIZER)
    rank.build("actor", spec)
    [shard] = pictured_shards(some_pictured(seen_by(folder)))
    rank.update("actor", shard, {})
    rank.save("actor", tmp_path)
    [[column]] = rank.logprobs("actor", shard) or []
    rank.build("actor", spec)
    rank.load("actor", tmp_path)
    [[again]] = rank.logprobs("actor", shard) or []
    assert np.array_equal(column, again)
    tower = stored(tmp_path / HF_FOLDER)
    assert tower and tower.keys() == tower_index(folder).keys()
    assert all(torch.equal(stored(folder)[name], tensor) for name, tensor in tower.items())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_text_alone_is_what_the_family_makes_of_it_to_the_bit(
    rank: Rank, folders: dict[str, Path], architecture: str, tmp_path: Path
) -> None:
    folder = folders[architecture]
    text_part(folder, tmp_path / "text", force=False, console=Console(quiet=True))
    words = [replace(each, images=()) for each in some_pictured(seen_by(folder))]
    for each in words:
        each.example.tokens[each.example.tokens >= 80] = 7
    [shard] = pictured_shards(words)
    rank.build("actor", seeing_spec(folder))
    rank.build("family", seeing_spec(tmp_path / "text"))
    [[seeing]], [[family]] = (rank.logprobs(role, shard) or [] for role in ("actor", "family"))
    assert np.array_equal(seeing, family)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_images_are_looked_at_again_after_the_role_was_offloaded(
    rank: Rank, folders: dict[str, Path], architecture: str
) -> None:
    rank.build("actor", seeing_spec(folders[architecture], offload=("params", "grads", "optimizer")))
    [shard] = pictured_shards(some_pictured(seen_by(folders[architecture])))
    first, again = (rank.logprobs("actor", shard) for _ in range(2))
    assert first is not None and again is not None
    assert np.array_equal(first[0][0], again[0][0])


def test_routing_is_replayed_beside_images(rank: Rank, folders: dict[str, Path], bounds: Tolerance) -> None:
    """Of every token, those of images among them."""
    folder = folders[QWEN3_MOE]
    rank.build("actor", replace(seeing_spec(folder), routing_replay=True))
    [shard] = pictured_shards(some_pictured(seen_by(folder)))
    [[free]] = rank.logprobs("actor", shard) or []
    chosen = chosen_by(rank.engine("actor"), shard, top=2)
    squares = np.concatenate([each.example.tokens for each in some_pictured(seen_by(folder))])
    squares = squares == seen_by(folder).image_token
    other = np.where(squares[:, None], (chosen + 1) % 4, chosen)
    [[replayed]], [[moved]] = (
        rank.logprobs("actor", routed(shard, lambda _, r=each: r)) or [] for each in (chosen, other)
    )
    np.testing.assert_allclose(replayed, free, atol=2 * bounds.split)
    assert np.abs(moved - free)[~squares].max() > 1e-3, "words behind an image attend to it"


def with_images(shard: Shard, images: tuple[tuple[bytes, ...], ...]) -> Shard:
    [[micro]] = [mini.micro_batches for mini in shard.mini_batches]
    return Shard((MiniBatch((replace(micro, images=images),)),))


def images_of(made: list[Pictured]) -> list[tuple[bytes, ...]]:
    return [each.images for each in made]


def test_other_pixels_are_other_logprobs(rank: Rank, folders: dict[str, Path]) -> None:
    """Of the sequence that has the image, behind it; everything else stays to the bit."""
    folder = folders[QWEN3]
    rank.build("actor", seeing_spec(folder))
    made = some_pictured(seen_by(folder))
    [shard] = pictured_shards(made)
    images = images_of(made)
    images[3] = (png(4 * 32, 2 * 32, seed=99),)
    [[before]], [[after]] = (rank.logprobs("actor", each) or [] for each in (shard, with_images(shard, tuple(images))))
    behind = len(before) - 11 - 1
    assert np.array_equal(before[: -len(made[3].example.tokens)], after[: -len(made[3].example.tokens)])
    assert np.abs(before - after)[behind:].max() > 0.01


def test_images_that_are_not_those_of_the_tokens_are_refused(
    rank: Rank, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = folders[QWEN2_5]
    rank.build("actor", seeing_spec(folder))
    made = some_pictured(seen_by(folder))
    [shard] = pictured_shards(made)
    images = images_of(made)
    with pytest.raises(
        MegarlError, match=r"Sequence 0 .* do not agree: 9 image tokens are there, and the images have 15"
    ):
        rank.logprobs("actor", with_images(shard, ((*images[0], png(84, 56)), *images[1:])))
    with pytest.raises(MegarlError, match=r"Sequence 3 .* do not agree: this is no PNG"):
        rank.logprobs("actor", with_images(shard, (*images[:3], (b"GIF89a",))))
    text_part(folder, tmp_path / "text", force=False, console=Console(quiet=True))
    rank.build("family", seeing_spec(tmp_path / "text"))
    with pytest.raises(MegarlError, match="has images, and the model sees none"):
        rank.logprobs("family", shard)
