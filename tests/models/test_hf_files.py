"""The files of a folder, against those that the safetensors library wrote, and every folder that is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.core.errors import UserError
from megarl.models.hf_config import load_model_config
from megarl.models.hf_files import check_weights, read_index
from megarl.models.rules import expected_tensors
from megarl.models.weight_files import INDEX, weight_files
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


def change_shard(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of whichever file holds the last norm."""
    for path in sorted(folder.glob("model-*.safetensors")):
        tensors = load_file(path)
        if "model.norm.weight" in tensors:
            edit(tensors)
            save_file(tensors, path)


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


def test_a_name_of_several_lines_is_shown_on_one(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"two\nlines": torch.zeros(2)}))
    with pytest.raises(UserError, match=r"not in the config: 'two\\nlines'\."):
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


@pytest.mark.parametrize(
    "edit",
    [lambda head: head * 2, lambda head: head.bfloat16(), lambda head: torch.cat([head, head[:1]])],
    ids=["values", "dtype", "shape"],
)
def test_a_stored_head_that_is_not_the_embedding_it_is_tied_to(edit: Callable[[Tensor], Tensor], folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"lm_head.weight": edit(tensors["model.embed_tokens.weight"])}))
    with pytest.raises(
        UserError, match=r"hold lm_head\.weight, which is not .* tie_word_embeddings to false there, or remove"
    ):
        check(folder)
    change(folder, lambda tensors: tensors.pop("lm_head.weight"))
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


def test_a_shard_that_is_missing(folder: Path) -> None:
    shard(folder)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(UserError, match=r"not there: model-2\.safetensors"):
        read_index(folder)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "holds list"),
        ("[" * 100_000, "nested too deeply"),
        ("\xff", "is not JSON"),
        ("{}", "has no weight_map"),
        ('{"weight_map": 3}', "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"a": null}}', "puts a in None"),
        ('{"weight_map": {"a": ["model-1.safetensors"]}}', r"puts a in \['model-1.safetensors'\]"),
        ('{"weight_map": {"a": ""}}', "puts a in ''"),
        ('{"weight_map": {"a": "/etc/x.safetensors"}}', "puts a in '/etc/x.safetensors'; .* within the folder"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "puts a in '../x.safetensors'; .* within the folder"),
        ('{"weight_map": {"a": "b/../../x.safetensors"}}', "within the folder"),
        ('{"weight_map": {"a": "./model-1.safetensors"}}', "within the folder"),
        ('{"weight_map": {"a": "x\\u0000.safetensors"}}', "within the folder"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', r"a .safetensors file within the folder is wanted"),
    ],
)
def test_an_index_that_is_broken(text: str, says: str, folder: Path) -> None:
    shard(folder).write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=says) as error:
        read_index(folder)
    assert str(folder / INDEX) in str(error.value)
    assert "\n" not in str(error.value)


def _edit(index: Path, edit: Callable[[dict[str, str]], object], **others: object) -> None:
    named = json.loads(index.read_text())["weight_map"]
    edit(named)
    index.write_text(json.dumps({"weight_map": named, **others}))


EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


def test_an_index_that_puts_a_tensor_in_another_file(folder: Path) -> None:
    index = shard(folder)
    place = json.loads(index.read_text())["weight_map"][NORM]
    other = {"model-1.safetensors": "model-2.safetensors", "model-2.safetensors": "model-1.safetensors"}[place]
    _edit(index, lambda named: named.update({NORM: other}))
    with pytest.raises(UserError, match=rf"the index names {NORM} in {other}, and it is in {place}.*Copy or export"):
        check(folder)


def test_a_tensor_in_two_files(folder: Path) -> None:
    """Which of them counts depends on the library: the one that the index names, or the last that is read."""
    shard(folder)
    second = load_file(folder / "model-2.safetensors")
    save_file(second | load_file(folder / "model-1.safetensors"), folder / "model-2.safetensors")
    with pytest.raises(UserError, match=r"two files hold .* in model-1\.safetensors and model-2\.safetensors"):
        check(folder)
    (folder / INDEX).unlink()
    with pytest.raises(UserError, match="two files hold"):
        check(folder)


def test_a_tensor_that_the_index_does_not_name(folder: Path) -> None:
    _edit(shard(folder), lambda named: named.pop(NORM))
    with pytest.raises(UserError, match=rf"the index does not name {NORM} in model-\d\.safetensors"):
        check(folder)


def test_a_name_that_no_file_holds_is_missing_only_where_it_is_needed(folder: Path) -> None:
    """Converters leave out a tied output layer, and go on naming it."""
    index = shard(folder)
    _edit(index, lambda named: named.update({"lm_head.weight": "model-1.safetensors"}))
    check(folder)
    change_shard(folder, lambda tensors: tensors.pop(NORM))
    with pytest.raises(UserError, match=rf"missing: {NORM}"):
        check(folder)


def test_files_that_the_index_does_not_name_are_passed_over(folder: Path) -> None:
    """As every library does: they may be the same weights in another form."""
    shard(folder)
    save_file({NORM: torch.zeros(1)}, folder / "other.safetensors")
    check(folder)


@pytest.mark.parametrize("size", [0, -1, "x", None, [], 10**30])
def test_the_total_size_of_an_index_is_not_looked_at(size: object, folder: Path) -> None:
    """Published folders have it wrong (of the shards before a tensor was dropped), and no library reads it."""
    _edit(shard(folder), lambda named: None, metadata={"total_size": size})
    check(folder)


def test_links_are_followed(folder: Path) -> None:
    """Caches of downloads are made of them."""
    shard(folder)
    (folder / "model-1.safetensors").rename(folder.parent / "blob")
    (folder / "model-1.safetensors").symlink_to("../blob")
    check(folder)


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_index_and_its_files_agree_or_are_refused(tmp_path: Path, data: st.DataObject) -> None:
    """Any files, any index: it is read only where every tensor is in one file, and that is the one the index names."""
    folder = Path(mkdtemp(dir=tmp_path))
    files, names = ["a.safetensors", "b.safetensors", "c.safetensors"], ["x", "y", "z"]
    held = {file: data.draw(st.sets(st.sampled_from(names)), label=file) for file in files}
    named = data.draw(st.dictionaries(st.sampled_from(names), st.sampled_from(files), min_size=1), label="index")
    for file, tensors in held.items():
        save_file({name: torch.zeros(1) for name in tensors}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": named}))
    counted = [(name, file) for file in sorted(set(named.values())) for name in held[file]]
    agrees = len({name for name, _ in counted}) == len(counted) and all(named.get(n) == file for n, file in counted)
    try:
        found = {(name, info.file.name) for name, info in read_index(folder).items()}
    except UserError:
        assert not agrees
    else:
        assert agrees
        assert found == set(counted)


def test_two_models_in_one_folder(folder: Path, source: Path) -> None:
    shard(folder)
    shutil.copy(source / "model.safetensors", folder)
    with pytest.raises(UserError, match="Remove what is out of date"):
        read_index(folder)
