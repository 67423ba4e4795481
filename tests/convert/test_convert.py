"""Conversions as a user runs them: round trips over layouts, and what is left when one is stopped."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.convert import convert as convert_module
from megarl.convert.convert import make_layout
from megarl.core.errors import UserError
from megarl.core.layout import Layout
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.roles import Optimizer
from megarl.training.manifest import read_manifest
from megarl.training.spec import PolicyObjective, RoleSpec
from tests.convert.conftest import flip, parsed
from tests.convert.forked import Conversions
from tests.convert.test_dtypes import BLOCK
from tests.support.fp8 import dequantised, write_fp8
from tests.support.processes import ended
from tests.support.tiny import write_tiny_model
from tests.training.harness import weights
from tests.training.samples import examples, shards

POLICY = PolicyObjective(Algorithm())

VOCAB = 97
CONVERT = [sys.executable, "-m", "megarl", "convert"]
slow = pytest.mark.slow


def convert(*words, code=0, **options):
    """Call the command; its two outputs."""
    done = subprocess.run(
        [*CONVERT, *map(str, words)], capture_output=True, text=True, timeout=300, check=False, **options
    )
    assert done.returncode == code, done.stderr
    return done.stdout, " ".join(done.stderr.split())


def tensors(folder):
    return load_file(folder / "model.safetensors")


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def stored(folder):
    """Every tensor of a checkpoint, read by torch alone."""
    from megarl.training.checkpoint_files import stored_tensors

    return dict(stored_tensors(folder, read_manifest(folder).tensors))


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """A mixture of experts, with a dense layer first."""
    folder = tmp_path_factory.mktemp("moe") / "model"
    return write_tiny_model(folder, "qwen3_moe", vocab_size=VOCAB, num_hidden_layers=4, mlp_only_layers=[0])


@pytest.fixture(scope="module")
def forked(ranks, tmp_path_factory):
    """Conversions in this process, but for their ranks."""
    conversions = Conversions(ranks, tmp_path_factory.mktemp("forked"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert_module, "run_ranks", conversions.run_ranks)
        yield conversions


@pytest.fixture(scope="module")
def mcore(hf, forked, tmp_path_factory):
    """The dense model as a checkpoint of one rank."""
    folder = tmp_path_factory.mktemp("mcore") / "model"
    assert forked.command("hf-to-mcore", hf, folder)[0] == 0
    return folder


@slow
def test_hf_goes_through_a_layout_and_comes_back_bit_for_bit(hf, tmp_path):
    out, _ = convert("hf-to-mcore", hf, tmp_path / "mcore", "--pp", "2", "--verify", "--json")
    assert parsed(out)["tensors_verified"] == len(tensors(hf)) and parsed(out)["differences"] == []
    manifest = read_manifest(tmp_path / "mcore")
    assert manifest.layout == Layout(pp=2, world_size=2) and manifest.optimizer is None
    convert("mcore-to-hf", tmp_path / "mcore", tmp_path / "hf", "--verify")
    assert_equal(tensors(tmp_path / "hf"), tensors(hf))
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (hf / "tokenizer.json").read_bytes()


@slow
def test_dtypes_go_over_layouts_and_come_back(forked, tmp_path):
    """FP8 linears beside norms in float32 and a router in half precision, over tensor and expert parallel, and back."""
    source = write_fp8(
        write_tiny_model(tmp_path / "source", "deepseek_v3", vocab_size=VOCAB, num_hidden_layers=2), BLOCK
    )
    expected = dequantised(source, BLOCK, torch.bfloat16)
    others = {name: torch.float32 for name in expected if "norm" in name} | {
        "model.layers.1.mlp.gate.weight": torch.float16
    }
    change = {name: torch.randn_like(expected[name], dtype=torch.float32).to(dtype) for name, dtype in others.items()}
    save_file(tensors(source) | change, source / "model.safetensors")
    expected |= change
    axes = {"tp": 2, "sequence_parallel": True, "ep": 2}
    done = forked.hf_to_mcore(source, tmp_path / "one", verify=True, **axes)
    assert done.differences == () and done.num_verified == len(expected)
    assert forked.reshard(tmp_path / "one", tmp_path / "two").differences == ()
    done = forked.mcore_to_hf(tmp_path / "two", tmp_path / "hf", verify=True)
    assert done.differences == () and done.num_verified == len(expected)
    assert_equal(tensors(tmp_path / "hf"), expected)
    assert "quantization_config" not in parsed((tmp_path / "hf" / "config.json").read_text())


@slow
def test_verify_sees_what_the_reader_gets_wrong(hf, ranks, tmp_path):
    (tmp_path / "forked").mkdir()
    lying = Conversions(ranks, tmp_path / "forked", "tests.convert.lying")
    code, out, _ = lying.command("hf-to-mcore", hf, tmp_path / "x", "--verify", "--json")
    assert code == 1
    assert len(parsed(out)["differences"]) == len(tensors(hf)) and not (tmp_path / "x").exists()


@slow
def test_another_dtype_is_the_rounded_source(hf, forked, tmp_path):
    done = forked.hf_to_mcore(hf, tmp_path / "mcore", dtype="bfloat16", verify=True)
    assert done.differences == () and done.num_verified == len(tensors(hf))
    forked.mcore_to_hf(tmp_path / "mcore", tmp_path / "hf", tp=2)
    assert_equal(tensors(tmp_path / "hf"), {name: tensor.bfloat16() for name, tensor in tensors(hf).items()})


def step(rank, seed):
    [shard], [columns] = shards([examples([9, 17, 30], VOCAB, seed)])
    return rank.update("actor", shard, columns)


@slow
def test_training_state_goes_over_expert_parallel_sizes_and_back_bit_for_bit(rank, moe, forked, tmp_path):
    """1 rank -> 2 (experts split) -> 4 (all axes, the first stage without experts) -> 1, and the next step is the same."""
    spec = RoleSpec(
        moe,
        "float32",
        optimizer=Optimizer(lr=1e-3, schedule="cosine"),
        total_steps=6,
        objective=POLICY,
    )
    rank.build("actor", spec)
    step(rank, 0), step(rank, 1)
    (tmp_path / "one").mkdir()
    rank.save("actor", tmp_path / "one")
    went_on, expected = step(rank, 2), weights(rank, "actor")
    layouts = {
        "split": {"ep": 2},
        "all": {"tp": 2, "sequence_parallel": True, "pp": 2, "ep": 2, "first_stage_layers": 1},
        "back": {},
    }
    source = tmp_path / "one"
    for name, layout in layouts.items():
        done = forked.reshard(source, tmp_path / name, **layout)
        assert done.differences == () and done.num_verified == len(read_manifest(source).tensors)
        source = tmp_path / name
    assert read_manifest(source).step == 2 and read_manifest(source).optimizer is not None
    assert_equal(stored(source), stored(tmp_path / "one"))
    rank.build("actor", spec)
    rank.load("actor", source)
    assert step(rank, 2) == went_on
    assert_equal(weights(rank, "actor"), expected)


@slow
def test_momentum_goes_over_expert_parallel_sizes(rank, moe, forked, tmp_path):
    sgd = Optimizer(name="sgd", lr=1e-2, momentum=0.9)
    rank.build("actor", RoleSpec(moe, "float32", optimizer=sgd, total_steps=6, objective=POLICY))
    step(rank, 0)
    (tmp_path / "one").mkdir()
    rank.save("actor", tmp_path / "one")
    assert forked.command("reshard", tmp_path / "one", tmp_path / "two", "--ep", "2", "--verify")[0] == 0
    found = stored(tmp_path / "two")
    assert_equal(found, stored(tmp_path / "one"))
    assert sum(tensor.abs().sum() for name, tensor in found.items() if "momentum_buffer" in name) > 0


@slow
def test_a_conversion_that_is_killed_leaves_nothing_under_the_final_name(hf, forked, tmp_path):
    command = [*CONVERT, "hf-to-mcore", str(hf), str(tmp_path / "x"), "--tp", "2", "--verify"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    content = tmp_path / ".tmp-x" / "content"
    try:
        end = time.monotonic() + 120
        while not list(content.glob("*.distcp")):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.01)
        children = psutil.Process(process.pid).children()  # the janitor among them
        ranks = [child.pid for child in children if "megarl.convert.worker" in child.cmdline()]
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert len(ranks) == 2 and ended(ranks)
    assert [path.name for path in tmp_path.iterdir()] == [".tmp-x"]
    assert forked.command("hf-to-mcore", hf, tmp_path / "x")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@slow
@pytest.mark.parametrize("operation", ["hf-to-mcore", "mcore-to-hf"])
def test_a_disk_that_fills_leaves_nothing(hf, mcore, tmp_path, operation):
    """A limit on the size of files stands for the disk: the write fails in the middle, after the space was checked."""
    source = {"hf-to-mcore": hf, "mcore-to-hf": mcore}[operation]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # noqa: E731
    _, error = convert(operation, source, tmp_path / "x", code=2, preexec_fn=limit)
    assert "Free some space" in error and str(tmp_path / "x") in error and ".tmp-" not in error
    assert list(tmp_path.iterdir()) == []


@slow
def test_a_conversion_that_takes_too_long_is_ended(hf, tmp_path):
    _, error = convert("hf-to-mcore", hf, tmp_path / "x", "--timeout", "1", code=1)
    assert "was not done after 1 s and was ended; nothing was kept. Still at work were the ranks [0]" in error
    assert list(tmp_path.iterdir()) == []


@slow
def test_mistakes_are_one_paragraph_and_exit_code_2(hf, forked, tmp_path):
    code, _, error = forked.command("hf-to-mcore", hf, tmp_path / "x", "--tp", "3")
    assert code == 2 and "cannot be for this model: tp 3 does not divide 4 attention heads" in error
    assert "Traceback" not in error and list(tmp_path.iterdir()) == []


@slow
def test_a_rank_that_dies_is_shown_and_the_others_are_ended(hf, tmp_path):
    command = [*CONVERT, "hf-to-mcore", str(hf), str(tmp_path / "x"), "--tp", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        children: list[psutil.Process] = []
        end = time.monotonic() + 60
        while len(children) < 2:
            assert process.poll() is None and time.monotonic() < end
            children = psutil.Process(process.pid).children()
            time.sleep(0.01)
        os.kill(children[1].pid, signal.SIGKILL)
        error = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1 and "ended: signal SIGKILL; nothing was kept" in " ".join(error.split())
    assert ended([child.pid for child in children]) and list(tmp_path.iterdir()) == []


@slow
def test_a_damaged_source_is_refused(mcore, forked, tmp_path):
    shutil.copytree(mcore, tmp_path / "mcore")
    flip(tmp_path / "mcore" / "__0_0.distcp", at=5000)
    code, _, error = forked.command("mcore-to-hf", tmp_path / "mcore", tmp_path / "x")
    assert code == 2 and "is damaged: __0_0.distcp has other content than was written" in error
    assert forked.command("inspect", tmp_path / "mcore")[0] == 1


def test_a_layout_has_as_few_ranks_as_it_needs():
    assert make_layout().world_size == 1
    assert make_layout(tp=2, pp=3).world_size == 6
    assert make_layout(ep=4).world_size == 4
    assert make_layout(tp=2, ep=4, etp=1, pp=2).world_size == 8
    assert make_layout(cp=2, ep=3).world_size == 6
    with pytest.raises(UserError, match="sizes of at least 1"):
        make_layout(tp=0)
