import errno
import io
import json
import os
import pickle
import resource
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType

from megarl.core.errors import MegarlError, UserError
from megarl.core.layout import Layout
from megarl.models.hf_config import load_model_config
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.roles import Optimizer
from megarl.training.manifest import MANIFEST, checkpoint_damage, read_manifest, read_model_config
from megarl.training.spec import PolicyObjective, RoleSpec
from tests.support.fused_adam import FakeFusedAdam
from tests.training.harness import VOCAB, weights
from tests.training.samples import examples, shards

POLICY = PolicyObjective(Algorithm())


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
    spec = RoleSpec(folder, dtype, optimizer=optimizer, total_steps=6, objective=POLICY)
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


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_checkpoint_of_a_fresh_model_can_be_resumed(rank, folder, tmp_path, name):
    optimizer = Optimizer(name=name, lr=1e-3, momentum=0.9)
    spec = RoleSpec(folder, "float32", optimizer=optimizer, total_steps=6, objective=POLICY)
    rank.build("actor", spec)
    rank.save("actor", tmp_path)
    went_on = steps(rank, [0])
    rank.build("actor", spec)
    rank.load("actor", tmp_path)
    assert steps(rank, [0]) == went_on


@pytest.mark.host_only  # where a fused Adam is installed, it is what the other tests save
def test_a_fused_adam_can_be_saved_before_and_after_its_first_step(rank, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.core.optimizer.Adam", FakeFusedAdam)
    monkeypatch.setattr("megatron.core.optimizer.distrib_optimizer.Adam", FakeFusedAdam)
    monkeypatch.setattr("megatron.core.optimizer.USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr("megatron.core.optimizer.distrib_optimizer.HAVE_APEX_OR_TE", True)
    monkeypatch.setattr("megatron.core.optimizer.distrib_optimizer.USING_TE_OPTIMIZER", True)
    spec = RoleSpec(folder, "float32", optimizer=Optimizer(lr=1e-3), total_steps=6, objective=POLICY)
    for name in ("fresh", "one"):
        (tmp_path / name).mkdir()
    rank.build("actor", spec)
    rank.save("actor", tmp_path / "fresh")
    first = steps(rank, [0])
    rank.save("actor", tmp_path / "one")
    second = steps(rank, [1])
    for name, seeds, expected in (("fresh", [0], first), ("fresh", [0, 1], second), ("one", [1], second)):
        rank.build("actor", spec)
        rank.load("actor", tmp_path / name)
        assert steps(rank, seeds) == expected


def test_what_is_about_fp8_is_left_out_of_a_checkpoint(rank):
    """Experts of Transformer Engine are one module, whose extra state Megatron names after each of them."""
    from megarl.training.checkpoint import _weights

    names = (
        "0.weight",
        "0._extra_state",
        "mlp.experts.weight1",
        "mlp.experts._extra_state",
        "mlp.experts._extra_state11",
    )
    chunk = SimpleNamespace(sharded_state_dict=lambda metadata: dict.fromkeys(names))
    assert list(_weights([chunk])["model"]) == ["0.weight", "mlp.experts.weight1"]


def test_a_longer_run_lays_its_schedule_out_anew(rank, folder, tmp_path):
    optimizer = Optimizer(lr=1e-3, schedule="linear")
    rank.build("actor", RoleSpec(folder, "float32", optimizer=optimizer, total_steps=2, objective=POLICY))
    assert steps(rank, [0, 1])["actor/lr"] == 0
    rank.save("actor", tmp_path)
    rank.build("actor", RoleSpec(folder, "float32", optimizer=optimizer, total_steps=4, objective=POLICY))
    rank.load("actor", tmp_path)
    assert steps(rank, [2])["actor/lr"] == pytest.approx(0.25e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("before", "now"),
    [
        (
            Optimizer(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1),
            Optimizer(lr=1e-4, beta1=0.8, beta2=0.99, eps=1e-6, weight_decay=0.2, min_lr=1e-5, schedule="cosine"),
        ),
        (Optimizer(name="sgd", lr=1e-3, momentum=0.9), Optimizer(name="sgd", lr=1e-4, momentum=0.5)),
    ],
    ids=["adam", "sgd"],
)
def test_a_resumed_run_learns_at_the_rates_of_its_own_recipe(rank, folder, tmp_path, dtype, before, now):
    """Against a run that was built with them and takes over no checkpoint."""

    def build(optimizer):
        rank.build("actor", RoleSpec(folder, dtype, optimizer=optimizer, total_steps=6, objective=POLICY))

    def settings():
        groups = rank.engine("actor")._stepper.optimizer.param_groups
        return [{key: group[key] for key in group if key not in ("params", "lr", "step")} for group in groups]

    build(now)
    steps(rank, [0, 1])
    expected, rate = settings(), steps(rank, [2])["actor/lr"]
    build(before)
    steps(rank, [0, 1])
    rank.save("actor", tmp_path)
    build(now)
    rank.load("actor", tmp_path)
    assert settings() == expected
    assert steps(rank, [2])["actor/lr"] == rate


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:1000]), "rank 0: "),
        (lambda file: file.unlink(), "rank 0: FileNotFoundError: .*__0_0.distcp"),
    ],
    ids=["cut", "gone"],
)
def test_a_file_that_cannot_be_read_is_told_without_traces(rank, folder, tmp_path, harm, said):
    rank.build("reference", RoleSpec(folder, "float32"))
    rank.save("reference", tmp_path)
    harm(tmp_path / "__0_0.distcp")
    with pytest.raises(MegarlError, match=rf"could not be read\. {said}.*`megarl convert inspect`") as error:
        rank.load("reference", tmp_path)
    assert "Traceback" not in str(error.value)


class Runs:
    """What a stranger puts into a pickle."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


@pytest.mark.parametrize(
    ("opened", "said"), [("at once", "names posix.mkdir"), ("later", "as a pickle, and no tensor")]
)
def test_a_checkpoint_of_somebody_s_runs_nothing(rank, folder, tmp_path, opened, said):
    """torch opens `.metadata` as a pickle, and whatever is said there to be one."""
    proof = tmp_path / "proof"
    rank.build("reference", RoleSpec(folder, "float32"))
    rank.save("reference", tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    if opened == "at once":
        metadata.planner_data = Runs(proof)
    else:
        written = io.BytesIO()
        torch.save(Runs(proof), written)
        (tmp_path / "__0_0.distcp").write_bytes(written.getvalue())
        name, index = next((each.fqn, each) for each in metadata.storage_data)
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        stored = replace(metadata.storage_data.pop(index), offset=0, length=len(written.getvalue()))
        metadata.storage_data[MetadataIndex(name)] = stored
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=said):
        rank.load("reference", tmp_path)
    assert not proof.exists()


def test_a_folder_without_a_checkpoint_is_refused(rank, folder, tmp_path):
    rank.build(
        "actor",
        RoleSpec(folder, "float32", optimizer=Optimizer(), objective=POLICY, total_steps=2),
    )
    with pytest.raises(UserError, match="holds no distributed checkpoint"):
        rank.load("actor", tmp_path)


def test_what_lies_beside_the_model_goes_into_the_checkpoint(rank, folder, tmp_path):
    """A folder named as a tokenizer's files are does not end the save."""
    source = tmp_path / "source"
    shutil.copytree(folder, source)
    (source / "tokenizer").mkdir()
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    (tmp_path / "saved").mkdir()
    rank.build("reference", RoleSpec(source, "float32"))
    rank.save("reference", tmp_path / "saved")
    assert not (tmp_path / "saved" / "hf" / "tokenizer").exists()
    assert "hf/additional_chat_templates/tool_use.jinja" in read_manifest(tmp_path / "saved").files


def test_the_manifest_says_what_is_in_it(rank, folder, tmp_path):
    optimizer = Optimizer(lr=1e-3, beta2=0.9)
    rank.build(
        "actor",
        RoleSpec(folder, "bfloat16", optimizer=optimizer, total_steps=6, objective=POLICY),
    )
    steps(rank, [0, 1])
    rank.save("actor", tmp_path)
    found = read_manifest(tmp_path)
    assert (found.family, found.dtype, found.step, found.total_steps) == ("qwen3", "bfloat16", 2, 6)
    assert found.layout == Layout() and Optimizer.model_validate(found.optimizer) == optimizer
    kinds = {
        name.removesuffix("output_layer.weight"): entry for name, entry in found.tensors.items() if "output" in name
    }
    assert {name: (entry.dtype, entry.bytes) for name, entry in kinds.items()} == {
        "": ("bfloat16", VOCAB * 64 * 2),
        "optimizer.state.param.": ("float32", VOCAB * 64 * 4),
        "optimizer.state.exp_avg.": ("float32", VOCAB * 64 * 4),
        "optimizer.state.exp_avg_sq.": ("float32", VOCAB * 64 * 4),
    }
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert set(found.files) == written - {MANIFEST}
    configs = [json.loads((each / "config.json").read_text()) for each in (tmp_path / "hf", folder)]
    assert configs[0] == configs[1] | {"dtype": "bfloat16"}, "a config says what its weights are"
    assert checkpoint_damage(tmp_path, read=True) == []


def test_training_goes_on_while_a_checkpoint_is_written(rank, folder, tmp_path):
    spec = RoleSpec(folder, "float32", optimizer=Optimizer(lr=1e-3), total_steps=6, objective=POLICY)
    rank.build("actor", spec)
    steps(rank, [0])
    saved = weights(rank, "actor")
    rank.save("actor", tmp_path, wait=False)
    went_on = steps(rank, [1])
    assert not (tmp_path / MANIFEST).exists() and not (tmp_path / "metadata.json").exists()
    rank.finish_save("actor")
    assert checkpoint_damage(tmp_path, read=True) == []
    rank.build("actor", spec)
    rank.load("actor", tmp_path)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in weights(rank, "actor").items())
    assert steps(rank, [1]) == went_on


def test_what_nobody_else_has_is_written_without_a_copy(tmp_path):
    from megarl.training.checkpoint_files import RankWriter

    shared, spare = torch.zeros(4, 8), torch.ones(4, 8)
    resolved = {"shared": shared, "view": shared[1], "spare": spare, "part": spare[2:]}
    items = [SimpleNamespace(type=WriteItemType.TENSOR, index=name) for name in resolved]
    plan = SimpleNamespace(items=items, storage_data=SimpleNamespace(prefix="rank"))
    planner = SimpleNamespace(resolve_data=lambda item: resolved[item.index])
    writer = RankWriter(tmp_path, copy=True, spare={spare.data_ptr()})
    writer.prepare_write_data(plan, planner)
    shared += 1
    held = {item.index: data for item, data in writer._data}
    assert not held["shared"].any() and not held["view"].any()
    assert held["spare"] is spare and held["part"].untyped_storage().data_ptr() == spare.data_ptr()


def test_a_frozen_role_saves_its_weights_and_nothing_to_train_on(rank, folder, tmp_path):
    rank.build("reference", RoleSpec(folder, "float32"))
    expected = weights(rank, "reference")
    rank.save("reference", tmp_path)
    assert read_manifest(tmp_path).optimizer is None
    rank.build("reference", RoleSpec(tmp_path / "hf", "float32", load_weights=False))
    rank.load("reference", tmp_path)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(rank, "reference").items())
    rank.build(
        "actor",
        RoleSpec(folder, "float32", optimizer=Optimizer(), objective=POLICY, total_steps=2),
    )
    with pytest.raises(UserError, match=r"holds weights only.*convert mcore-to-hf"):
        rank.load("actor", tmp_path)


def test_a_frozen_role_reads_the_weights_of_one_in_training(rank, folder, tmp_path):
    rank.build(
        "actor",
        RoleSpec(folder, "float32", optimizer=Optimizer(lr=1e-3), total_steps=6, objective=POLICY),
    )
    steps(rank, [0])
    rank.save("actor", tmp_path)
    expected = weights(rank, "actor")
    rank.build("reference", RoleSpec(folder, "float32"))
    rank.load("reference", tmp_path)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(rank, "reference").items())


def test_a_state_of_other_weights_is_refused(rank, folder, tmp_path):
    """megatron-core 0.16.1 gathers such ones where a bucket is padded before another."""
    spec = RoleSpec(folder, "bfloat16", optimizer=Optimizer(lr=1e-3), total_steps=6, objective=POLICY)
    rank.build("actor", spec)
    steps(rank, [0])
    [member] = rank.engine("actor")._stepper.optimizer.chained_optimizers
    with torch.no_grad():
        member.shard_fp32_from_float16_groups[0][0].neg_()
    rank.save("actor", tmp_path)
    rank.build("actor", spec)
    with pytest.raises(UserError, match=r"are not the model's, in 1 tensors.*convert mcore-to-hf"):
        rank.load("actor", tmp_path)


@pytest.mark.parametrize(
    ("saved", "now", "said"),
    [
        (("sgd", 0.0, "float32"), ("adam", 0.0, "float32"), r"optimizer\.name was 'sgd' and is 'adam'"),
        (("sgd", 0.0, "float32"), ("sgd", 0.9, "float32"), r"optimizer\.momentum was 0\.0 and is 0\.9"),
        (("sgd", 0.9, "bfloat16"), ("sgd", 0.0, "bfloat16"), r"optimizer\.momentum was 0\.9 and is 0\.0"),
        (("sgd", 0.9, "float32"), ("sgd", 0.5, "bfloat16"), r"model\.dtype was 'float32' and is 'bfloat16'\. Go"),
        (("sgd", 0.0, "bfloat16"), ("sgd", 0.0, "float32"), r"model\.dtype was 'bfloat16' and is 'float32'"),
    ],
    ids=["name", "momentum", "no-momentum", "bf16", "float32"],
)
def test_a_state_that_the_optimizer_has_not_got_is_refused(rank, folder, tmp_path, saved, now, said):
    """Not by Megatron's own words for it, which are about tensors that are missing."""

    def build(name, momentum, dtype):
        optimizer = Optimizer(name=name, lr=1e-2, momentum=momentum)
        rank.build("actor", RoleSpec(folder, dtype, optimizer=optimizer, objective=POLICY, total_steps=2))

    build(*saved)
    rank.save("actor", tmp_path)
    build(*now)
    with pytest.raises(UserError, match=rf"holds an optimizer's state that the recipe's cannot go on from: {said}"):
        rank.load("actor", tmp_path)


@pytest.mark.parametrize(("before", "now"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_adam_goes_on_in_another_dtype(rank, folder, tmp_path, before, now):
    """From the weights that it keeps in float32, to the bit."""

    def build(dtype):
        spec = RoleSpec(folder, dtype, optimizer=Optimizer(lr=1e-3), total_steps=6, objective=POLICY)
        rank.build("actor", spec)

    def kept():
        [member] = rank.engine("actor")._stepper.optimizer.chained_optimizers
        return [each.clone() for group in member.optimizer.param_groups for each in group["params"]]

    build(before)
    steps(rank, [0, 1])
    rank.save("actor", tmp_path)
    expected = kept()
    build(now)
    rank.load("actor", tmp_path)
    assert all(torch.equal(*pair) for pair in zip(kept(), expected, strict=True))


@pytest.mark.parametrize("wait", [True, False], ids=["at once", "meanwhile"])
def test_a_disk_that_fills_is_told_and_leaves_no_checkpoint(rank, folder, tmp_path, wait):
    """A limit on the size of files stands for the disk."""
    rank.build("actor", RoleSpec(folder, "float32"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"could not be written to .*rank 0: the disk is full .*Free some space"):
            rank.save("actor", tmp_path, wait=wait)
            rank.finish_save("actor")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / MANIFEST).exists() and not (tmp_path / "metadata.json").exists()
    assert "megarl.json is missing. The checkpoint was not finished" in checkpoint_damage(tmp_path, read=False)[0]


@pytest.mark.parametrize("wait", [True, False], ids=["at once", "meanwhile"])
@pytest.mark.parametrize(
    "last",
    [
        "megatron.core.dist_checkpointing.strategies.filesystem_async.FileSystemWriterAsync.finish",
        "megarl.training.checkpoint_files.save_config",
        "megarl.training.checkpoint.copy_beside",
        "megarl.training.manifest.Manifest.write",
    ],
)
def test_a_disk_that_fills_last_of_all_is_told_as_well(rank, folder, tmp_path, monkeypatch, last, wait):
    """Rank 0 writes that: it ended with a trace, and the others waited for it."""

    def refused(*given, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rank.build("actor", RoleSpec(folder, "float32"))
    monkeypatch.setattr(last, refused)
    with pytest.raises(UserError, match=r"could not be written to .*rank 0: the disk is full .*Free some space"):
        rank.save("actor", tmp_path, wait=wait)
        rank.finish_save("actor")
    assert not (tmp_path / MANIFEST).exists()


def test_a_disk_that_is_full_already_is_told(rank, folder, tmp_path):
    """The first that is written is torch's to write, which has words of its own for it."""
    optimizer = Optimizer(lr=1e-3)
    rank.build("actor", RoleSpec(folder, "float32", optimizer=optimizer, total_steps=6, objective=POLICY))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(UserError, match=r"could not be written to .*rank 0: RuntimeError: .*Free some space"):
            rank.save("actor", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_critic_s_checkpoint_has_the_config_of_a_score_head(rank, folder, tmp_path):
    """It was built from a policy's folder, and is read by a conversion from its own."""
    rank.build("critic", RoleSpec(folder, "float32", head="score"))
    rank.save("critic", tmp_path)
    config = read_model_config(tmp_path / "hf")
    assert config.head == "score" and config == load_model_config(folder).with_score_head()
    rank.build("critic", RoleSpec(tmp_path / "hf", "float32", load_weights=False))
    rank.load("critic", tmp_path)
    rank.export_hf("critic", tmp_path / "hf", tmp_path / "out")
    assert load_model_config(tmp_path / "out").head == "score"
