import json
from pathlib import Path

import pytest

from megarl.convert import convert
from megarl.core.checksums import sum_files
from megarl.core.layout import Layout
from megarl.training.manifest import HF_FOLDER, Manifest, TensorEntry
from megarl.training.rank import Rank
from megarl.training.run_checkpoints import Checkpoints
from tests.convert.forked import Conversions
from tests.support.forked_ranks import Ranks
from tests.support.tiny import write_tiny_model

VOCAB = 97  # padded under tensor parallel


@pytest.fixture(scope="session")
def hf(tmp_path_factory):
    """A random dense model."""
    return write_tiny_model(tmp_path_factory.mktemp("hf") / "qwen3", vocab_size=VOCAB, num_hidden_layers=2)


@pytest.fixture
def forked(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Conversions:
    """Ranks of a conversion are copies of a process that has loaded transformers' configs as well."""
    folder = tmp_path / "forked"
    folder.mkdir()
    conversions = Conversions(ranks, folder, "tests.convert.seeing_forked")
    monkeypatch.setattr(convert, "run_ranks", conversions.run_ranks)
    return conversions


@pytest.fixture(scope="module")
def rank():
    """One rank, which is all there is."""
    rank = Rank(0, 1, "cpu", seed=1)
    rank.rendezvous("127.0.0.1", rank.free_port(), timeout_s=30)
    yield rank
    rank.close()


def write_checkpoint(folder, hf, **fields):
    """A folder that looks like a checkpoint, without Megatron: for what only reads manifests."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HF_FOLDER).mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / HF_FOLDER / name).write_bytes((hf / name).read_bytes())
    (folder / "__0_0.distcp").write_bytes(bytes(range(200)))
    (folder / "metadata.json").write_text("{}")
    names = ["__0_0.distcp", "metadata.json", "hf/config.json", "hf/tokenizer.json"]
    values = {
        "family": "qwen3",
        "architecture": "Qwen3ForCausalLM",
        "dtype": "float32",
        "step": 12,
        "layout": Layout(tp=2, world_size=4),
        "optimizer": {"name": "adam"},
        "total_steps": 40,
        "lora": None,
        "versions": {"megarl": "0.1.0"},
        "tensors": {
            "output_layer.weight": TensorEntry((97, 64), "float32", 97 * 64 * 4),
            "optimizer.state.exp_avg.output_layer.weight": TensorEntry((97, 64), "float32", 97 * 64 * 4),
        },
        "files": sum_files(folder, names),
    }
    Manifest(**{**values, **fields}).write(folder)
    return folder


@pytest.fixture
def run(tmp_path, hf):
    """A run's folder with two checkpoints."""
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=2)
    for step in (3, 6):
        write_checkpoint(checkpoints.begin(step, ["actor"])["actor"], hf)
        checkpoints.commit(step, {"weight_version": step})
    (tmp_path / "run" / "recipe.yaml").write_text("run:\n  name: quick\n  seed: 3\n")
    return tmp_path / "run"


def flip(path, at=100):
    """Turn one bit over."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def parsed(text):
    """The JSON object that a command printed."""
    return json.loads(text)
