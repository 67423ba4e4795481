"""The folder that an export leaves: transformers loads it, and a disk that is full leaves none."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from megarl.core.errors import MegarlError, UserError
from megarl.models.hf_config import load_model_config, parse_model_config
from megarl.models.hf_files import check_weights
from megarl.models.hf_save import save_hf, write_config
from megarl.models.hf_weights import Bucket
from megarl.models.rules import expected_tensors
from tests.support.tiny import tiny_config, write_tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("save") / "model")


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def buckets_of(folder: Path) -> list[Bucket]:
    tensors = list(stored(folder).items())
    return [tensors[:5], [], tensors[5:]]


def check(folder: Path) -> None:
    config = load_model_config(folder)
    check_weights(expected_tensors(config), folder, config)


@pytest.mark.parametrize("limit", [1, 1 << 17, 1 << 30])
def test_transformers_loads_it_bit_by_bit(limit: int, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    save_hf(buckets_of(source), load_model_config(source), source, target, max_shard_bytes=limit)
    expected, found = stored(source), stored(target)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    check(target)
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (target, source)]
    assert all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))
    files = sorted(target.glob("*.safetensors"))
    assert (target / "model.safetensors.index.json").exists() == (len(files) > 1)
    assert len(files) == {1: len(expected), 1 << 30: 1}.get(limit, len(files))
    for path in files:
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            sizes = [file.get_tensor(name).nbytes for name in file.keys()]  # noqa: SIM118
        assert len(sizes) == 1 or sum(sizes) <= limit


def test_every_tensor_keeps_its_dtype(tmp_path: Path) -> None:
    source, target = write_tiny_model(tmp_path / "source", "deepseek_v3"), tmp_path / "target"
    bias = "correction_bias"
    tensors = [(name, t if name.endswith(bias) else t.bfloat16()) for name, t in stored(source).items()]
    save_hf([tensors], load_model_config(source), source, target)
    found = stored(target)
    assert {found[name].dtype for name, _ in tensors if name.endswith(bias)} == {torch.float32}
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_config_names_the_dtype_of_its_weights(key: str, source: Path, tmp_path: Path) -> None:
    origin, target = tmp_path / "origin", tmp_path / "target"
    shutil.copytree(source, origin)
    raw = json.loads((origin / "config.json").read_text())
    raw.pop("dtype", None)
    (origin / "config.json").write_text(json.dumps({**raw, key: "bfloat16"}))
    save_hf(buckets_of(source), load_model_config(source), origin, target)
    assert json.loads((target / "config.json").read_text()) == {**raw, key: "float32"}
    model = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert model.dtype == torch.float32
    assert torch.equal(model.model.norm.weight, stored(source)["model.norm.weight"])


def test_what_is_saved_can_still_be_freed(source: Path, tmp_path: Path) -> None:
    weights = {name: tensor.clone() for name, tensor in stored(source).items()}
    save_hf([list(weights.items())], load_model_config(source), source, tmp_path / "target")
    assert all(tensor.untyped_storage().resizable() for tensor in weights.values())


def test_the_tokenizer_and_generation_settings_come_along(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    save_hf(buckets_of(source), load_model_config(source), source, target)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert AutoTokenizer.from_pretrained(target).encode("1+1=") == AutoTokenizer.from_pretrained(source).encode("1+1=")


def test_an_export_needs_no_code_of_its_own(tmp_path: Path) -> None:
    """Kimi-K2's config is DeepSeek-V3's but for these two keys."""
    source, target = write_tiny_model(tmp_path / "source", "deepseek_v3"), tmp_path / "target"
    raw = json.loads((source / "config.json").read_text())
    own = {"model_type": "kimi_k2", "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}}
    (source / "config.json").write_text(json.dumps(raw | own))
    save_hf(buckets_of(source), load_model_config(source), source, target)
    assert json.loads((target / "config.json").read_text()) == raw
    AutoModelForCausalLM.from_pretrained(target)


def test_an_export_says_its_model_type_whether_or_not_the_source_did(source: Path, tmp_path: Path) -> None:
    raw = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({key: raw[key] for key in raw if key != "model_type"}))
    write_config(tmp_path / "config.json", tmp_path / "config.json", "float32", load_model_config(source))
    assert json.loads((tmp_path / "config.json").read_text()) == raw


def test_a_reward_model_of_gemma_has_the_name_that_transformers_gives_it(tmp_path: Path) -> None:
    """Under the other name, which exports had, it is read too."""
    source, target = write_tiny_model(tmp_path / "source", "gemma3"), tmp_path / "target"
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)
    model.save_pretrained(source)
    config, raw = load_model_config(source), json.loads((source / "config.json").read_text())
    assert config.head == "score"
    other = {"architectures": ["Gemma3ForSequenceClassification"]}
    (source / "config.json").write_text(json.dumps(raw | other))
    assert load_model_config(source) == config
    save_hf(buckets_of(source), config, source, target)
    check(target)
    [name] = json.loads((target / "config.json").read_text())["architectures"]
    found = getattr(transformers, name).from_pretrained(target)
    assert all(torch.equal(found.state_dict()[key], tensor) for key, tensor in model.state_dict().items())


def test_an_exported_score_is_one_label_whatever_the_source_counts(tmp_path: Path) -> None:
    raw = tiny_config("qwen3").to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    source, target = tmp_path / "source.json", tmp_path / "config.json"
    source.write_text(json.dumps(raw | {"num_labels": 3, "problem_type": "single_label_classification"}))
    write_config(source, target, "float32", parse_model_config(raw, source).with_score_head())
    assert AutoConfig.from_pretrained(target).num_labels == 1


def test_an_export_replaces_the_one_before_and_leaves_nothing_beside_it(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "model-00001-of-00002.safetensors").write_text("of an earlier export")
    (tmp_path / ".tmp-target").mkdir()
    (tmp_path / ".tmp-target" / "half.safetensors").write_text("of an export that was killed")
    save_hf(buckets_of(source), load_model_config(source), source, target)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    check(target)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda tensors: [], "without the tensors model.embed_tokens.weight|without the tensors lm_head.weight"),
        (lambda tensors: tensors[:-1], "ended without the tensors model.norm.weight"),
        (lambda tensors: [*tensors, tensors[-1]], "or a second"),
        (lambda tensors: [*tensors, ("odd", torch.zeros(2))], r"odd \[2\] came"),
        (lambda tensors: [("model.norm.weight", torch.zeros(2))], r"model\.norm\.weight \[2\] came"),
    ],
)
def test_an_export_that_is_not_the_model_leaves_the_one_before(
    broken: object, says: str, source: Path, tmp_path: Path
) -> None:
    target, config = tmp_path / "target", load_model_config(source)
    save_hf(buckets_of(source), config, source, target)
    with pytest.raises(MegarlError, match=says):
        save_hf([broken(list(stored(source).items()))], config, source, target)  # type: ignore[operator]
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    check(target)


def test_a_disk_that_is_too_small_is_seen_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("megarl.models.hf_save.shutil.disk_usage", lambda _: usage(2_000_000, 1_900_000, 100_000))
    needed = sum(tensor.nbytes for tensor in stored(source).values())
    with pytest.raises(UserError, match=f"need {needed / 1e9:.3f} GB, and 0.000 GB are free"):
        save_hf(buckets_of(source), load_model_config(source), source, tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


LIMITED = """
import resource, sys
from pathlib import Path
from safetensors.torch import load_file
from megarl.core.errors import UserError
from megarl.models.hf_config import load_model_config, parse_model_config
from megarl.models.hf_save import save_hf, write_config
source, target = Path(sys.argv[1]), Path(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    save_hf([list(load_file(source / "model.safetensors").items())], load_model_config(source), source, target)
except UserError as error:
    print(error)
"""


def test_a_write_that_the_disk_refuses_leaves_nothing(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(source), str(tmp_path / "target")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "No room for the weights" in done.stdout
    assert "nothing was left behind" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("last", ["write_config", "copy_beside", "sync_tree"])
def test_a_disk_that_fills_behind_the_weights_leaves_nothing(
    last: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(f"megarl.models.hf_save.{last}", refused)
    with pytest.raises(UserError, match=r"No room for the weights in .*target.* nothing was left behind"):
        save_hf(buckets_of(source), load_model_config(source), source, tmp_path / "target")
    assert list(tmp_path.iterdir()) == []
