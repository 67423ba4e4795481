import pytest
import torch

from megarl.core.errors import UserError
from megarl.recipe.schema import Algorithm, Optimizer
from megarl.training.rank import RoleSpec
from tests.training.harness import VOCAB, weights
from tests.training.samples import examples, shards


def steps(rank, seeds):
    for seed in seeds:
        [shard], [columns] = shards([examples([9, 17, 30], VOCAB, seed)])
        metrics = rank.update("actor", shard, columns)
    return metrics


@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [
        ("float32", Optimizer(lr=1e-3, schedule="cosine", warmup_steps=2)),
        ("bfloat16", Optimizer(lr=1e-3)),
        ("float32", Optimizer(name="sgd", lr=1e-2, momentum=0.9)),
        ("float32", Optimizer(name="sgd", lr=1e-2)),
        ("bfloat16", Optimizer(name="sgd", lr=1e-2, momentum=0.9)),
    ],
    ids=["adam", "adam-bf16", "sgd-momentum", "sgd", "sgd-bf16"],
)
def test_a_resumed_run_takes_the_very_same_step(rank, folder, tmp_path, dtype, optimizer):
    spec = RoleSpec(folder, dtype, optimizer=optimizer, total_steps=6, algorithm=Algorithm())
    rank.build("actor", spec)
    steps(rank, [0, 1, 2])
    rank.save("actor", tmp_path)
    went_on = steps(rank, [3])
    expected = weights(rank, "actor")
    rank.build("actor", spec)
    rank.load("actor", tmp_path)
    assert rank.engine("actor").num_steps == 3
    assert steps(rank, [3]) == went_on
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(rank, "actor").items())


def test_a_checkpoint_of_a_fresh_model_can_be_resumed(rank, folder, tmp_path):
    spec = RoleSpec(folder, "float32", optimizer=Optimizer(lr=1e-3), total_steps=6, algorithm=Algorithm())
    rank.build("actor", spec)
    rank.save("actor", tmp_path)
    went_on = steps(rank, [0])
    rank.build("actor", spec)
    rank.load("actor", tmp_path)
    assert steps(rank, [0]) == went_on


def test_a_longer_run_lays_its_schedule_out_anew(rank, folder, tmp_path):
    optimizer = Optimizer(lr=1e-3, schedule="linear")
    rank.build("actor", RoleSpec(folder, "float32", optimizer=optimizer, total_steps=2, algorithm=Algorithm()))
    assert steps(rank, [0, 1])["actor/lr"] == 0
    rank.save("actor", tmp_path)
    rank.build("actor", RoleSpec(folder, "float32", optimizer=optimizer, total_steps=4, algorithm=Algorithm()))
    rank.load("actor", tmp_path)
    assert steps(rank, [2])["actor/lr"] == pytest.approx(0.25e-3)


def test_a_folder_without_a_checkpoint_is_refused(rank, folder, tmp_path):
    rank.build("actor", RoleSpec(folder, "float32", optimizer=Optimizer(), algorithm=Algorithm(), total_steps=2))
    with pytest.raises(UserError, match="holds no distributed checkpoint"):
        rank.load("actor", tmp_path)
