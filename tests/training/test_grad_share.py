"""One parameter that holds nearly all of a gradient is told of, by name and row, once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.recipe.roles import Lora
from megarl.training.grad_share import _squares
from megarl.training.rank import Rank
from megarl.training.spec import NEARLY_ALL, RewardObjective, RoleSpec
from tests.support.tiny import write_tiny_qwen
from tests.support.tolerances import Tolerance
from tests.training import torch_loop
from tests.training.harness import VOCAB
from tests.training.pairs import pair_shards
from tests.training.samples import examples, shards

EMBEDDING = "embedding.word_embeddings.weight"
MINI = examples([9, 17, 30], VOCAB)


@pytest.fixture(scope="module")
def unnamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose padding token has the embedding zero, and whose config does not name it."""
    folder = write_tiny_qwen(tmp_path_factory.mktemp("unnamed"), vocab_size=VOCAB)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": None}))
    return folder


def update(rank: Rank, spec: RoleSpec) -> float:
    [shard], [columns] = shards([MINI])
    rank.build("actor", spec)
    return rank.update("actor", shard, columns)["actor/grad_share_max"]


def gradients(folder: Path) -> dict[str, torch.Tensor]:
    """transformers'."""
    model = torch_loop.load(folder)
    torch_loop.loss(model, MINI).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_squares_of_long_gradients_are_theirs() -> None:
    gradients = [torch.ones(3), torch.randn(5_000_000, generator=torch.Generator().manual_seed(0)), torch.zeros(0)]
    expected = [float(each.double().square().sum()) for each in gradients]
    assert _squares(gradients).tolist() == pytest.approx(expected, rel=4e-5)


def share(gradient: torch.Tensor, everything: dict[str, torch.Tensor]) -> float:
    return float(gradient.square().sum() / sum(each.square().sum() for each in everything.values()))


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_padding_token_that_config_json_does_not_name_is_told_of_once(
    rank: Rank, spec: RoleSpec, unnamed: Path, name: str
) -> None:
    section = spec.optimizer.model_copy(update={"name": name})  # type: ignore[union-attr]
    expected = gradients(unnamed)
    found = update(rank, replace(spec, folder=unnamed, optimizer=section))
    assert found == pytest.approx(share(expected["model.embed_tokens.weight"], expected), rel=1e-4)
    assert found > NEARLY_ALL
    [note] = rank.take_notes("actor")
    assert note.startswith(f"{EMBEDDING} (most of it in row 0) holds 99.")
    [shard], [columns] = shards([MINI, MINI])
    rank.update("actor", shard, columns)
    assert rank.take_notes("actor") == []


def test_a_new_score_head_is_not_told_of_and_hides_nothing_that_is(
    rank: Rank, spec: RoleSpec, folder: Path, unnamed: Path
) -> None:
    """It is zero, so that the first gradient is its own alone."""
    [shard], [columns] = pair_shards(MINI + MINI[:1], scored=True)
    for path, told in ((folder, []), (unnamed, [EMBEDDING])):
        rank.build("rm", replace(spec, folder=path, head="score", objective=RewardObjective()))
        assert rank.update("rm", shard, columns)["rm/grad_share_max"] > NEARLY_ALL
        assert rank.take_notes("rm") == []
        rank.update("rm", shard, columns)
        assert [note.split()[0] for note in rank.take_notes("rm")] == told


def test_it_is_the_share_of_the_largest_parameter_of_a_sound_model(
    rank: Rank, spec: RoleSpec, folder: Path, bounds: Tolerance
) -> None:
    expected = gradients(folder)
    fused = {
        name: gradient for name, gradient in expected.items() if name.endswith(("o_proj.weight", "down_proj.weight"))
    }
    found = update(rank, spec)
    largest = max(share(each, expected) for each in (*fused.values(), expected["model.embed_tokens.weight"]))
    assert largest - bounds.split <= found < 0.9
    assert rank.take_notes("actor") == []


@pytest.mark.parametrize(
    "change", [{"dtype": "bfloat16"}, {"lora": Lora(rank=2, alpha=4.0, targets=("linear_qkv", "linear_proj"))}]
)
def test_other_optimizers_are_looked_into_as_well(rank: Rank, spec: RoleSpec, change: dict[str, object]) -> None:
    assert 0.02 < update(rank, replace(spec, **change)) < 0.9  # type: ignore[arg-type]
