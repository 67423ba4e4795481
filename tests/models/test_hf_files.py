"""Headers of safetensors files, against files that the safetensors library wrote, and every file that is refused."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.core.errors import UserError
from megarl.models.hf_config import load_model_config
from megarl.models.hf_files import check_weights, read_index, weight_files
from megarl.models.rules import expected_tensors
from tests.support.tiny import write_tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("files") / "model", num_hidden_layers=2, tie_word_embeddings=True)


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "model"))


def check(folder: Path) -> None:
    config = load_model_config(folder)
    check_weights(expected_tensors(config), folder, config)


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def shard(folder: Path) -> Path:
    """Replace the one file by two and their index; returns the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    place = {name: f"model-{1 + number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(place.values()):
        save_file({name: tensors[name] for name in tensors if place[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": place}))
    return index


def test_the_index_is_what_the_library_wrote(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16), "c": torch.zeros(())}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    index = read_index(tmp_path)
    assert {name: (info.shape, info.dtype) for name, info in index.items()} == {
        "a": ((3, 5), "F32"),
        "b": ((7,), "BF16"),
        "c": ((), "F32"),
    }
    assert {info.file for info in index.values()} == {tmp_path / "model.safetensors"}


def test_offsets_are_those_of_the_bytes(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7)}
    save_file(tensors, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    for name, info in read_index(tmp_path).items():
        found = content[info.offset : info.offset + tensors[name].nbytes]
        assert found == tensors[name].numpy().tobytes()


def test_layers_that_predict_further_tokens_are_passed_over(folder: Path) -> None:
    predicting = {f"model.layers.2.{name}.weight": torch.zeros(2) for name in ("eh_proj", "enorm", "mlp.gate_proj")}
    change(folder, lambda tensors: tensors.update(predicting))
    check(folder)


def test_a_layer_too_many_is_no_prediction_layer(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.layers.2.mlp.gate_proj.weight": torch.zeros(2)}))
    with pytest.raises(UserError, match=r"not in the config: model\.layers\.2\.mlp\.gate_proj\.weight"):
        check(folder)


def test_rotary_frequencies_are_passed_over(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}))
    check(folder)


def test_shards_are_read_through_their_index(folder: Path) -> None:
    whole = {name: info.shape for name, info in read_index(folder).items()}
    shard(folder)
    assert {name: info.shape for name, info in read_index(folder).items()} == whole
    assert [path.name for path in weight_files(folder)] == ["model-1.safetensors", "model-2.safetensors"]
    check(folder)


def test_the_same_weights_in_another_form_beside_the_model_are_passed_over(folder: Path) -> None:
    save_file({"tok_embeddings.weight": torch.zeros(2)}, folder / "consolidated.safetensors")
    check(folder)


def test_a_stored_copy_of_a_tied_output_layer_is_no_mistake(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    check(folder)


def _shorten(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()


def _round(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), ["missing: model.norm.weight"]),
        (lambda tensors: tensors.update(odd=torch.zeros(1)), ["not in the config: odd"]),
        (_shorten, ["of another shape: model.norm.weight is [63], the config says [64]"]),
        (_round, ["of another type: model.norm.weight is I8", "BF16"]),
        (dict.clear, ["missing: model.embed_tokens.weight", "and 19 more"]),
    ],
)
def test_weights_that_do_not_match(edit: Callable[[dict[str, Tensor]], object], says: list[str], folder: Path) -> None:
    change(folder, edit)
    with pytest.raises(UserError) as error:
        check(folder)
    for part in [str(folder), "do not match its config.json", *says]:
        assert part in str(error.value)


def _header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "header is missing"),
        (b"abc", "header is missing"),
        (b"\xff" * 64, "header is missing"),
        (_header(b"{not json"), "header is broken"),
        (_header(b"[]"), "header is broken"),
        (_header(b'{"a": 3}'), "header is broken"),
        (_header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'), "cut off: 69 bytes of 73"),
    ],
)
def test_files_that_are_not_safetensors(content: bytes, says: str, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=says) as error:
        read_index(folder)
    assert str(folder / "model.safetensors") in str(error.value)


def test_a_shard_that_is_missing(folder: Path) -> None:
    shard(folder)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(UserError, match=r"not there: model-2\.safetensors"):
        read_index(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_broken(text: str, folder: Path) -> None:
    shard(folder).write_text(text)
    with pytest.raises(UserError, match="is not an index"):
        read_index(folder)


def test_two_models_in_one_folder(folder: Path, source: Path) -> None:
    shard(folder)
    shutil.copy(source / "model.safetensors", folder)
    with pytest.raises(UserError, match="Remove what is out of date"):
        read_index(folder)
