"""Which files go with a model into checkpoints and exports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megarl.core.errors import UserError
from megarl.data.chat import load_tokenizer
from megarl.models.hf_beside import copy_beside, files_beside
from megarl.models.hf_config import load_model_config
from tests.support.privileges import without_privileges
from tests.support.tiny import write_tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("beside") / "model")


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "model"))


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_whole_files_go_along_and_folders_of_such_names_stay(folder: Path, tmp_path: Path) -> None:
    whole = names(folder) - {"config.json", "model.safetensors"}
    for name in ("tokenizer", "vocab.d"):
        (folder / name).mkdir()
        (folder / name / "x").write_text("")
    (folder / "tokenizer.model").symlink_to(folder / "tokenizer.json")
    (folder / "README.md").write_text("")
    load_model_config(folder)
    (tmp_path / "target").mkdir()
    copy_beside(folder, tmp_path / "target")
    assert names(tmp_path / "target") == whole | {"tokenizer.model"}
    assert not (tmp_path / "target" / "tokenizer.model").is_symlink()


def test_what_other_tokenizers_and_templates_lie_in_goes_along(folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "TOOLS"}
    tokenizer.save_pretrained(folder)
    for name in ("tiktoken.model", "qwen.tiktoken", "tekken.json", "chat_template.json"):
        (folder / name).write_text("{}")
    (tmp_path / "target").mkdir()
    copy_beside(folder, tmp_path / "target")
    assert names(tmp_path / "target") == names(folder) - {"config.json", "model.safetensors"}
    assert AutoTokenizer.from_pretrained(tmp_path / "target").chat_template == tokenizer.chat_template


def test_code_stays_and_nothing_that_is_written_names_it(folder: Path, tmp_path: Path) -> None:
    path = folder / "tokenizer_config.json"
    raw = json.loads(path.read_text()) | {"name": "é"}
    path.write_text(json.dumps(raw | {"auto_map": {"AutoTokenizer": ["own.Own", None]}}))
    (folder / "own.py").write_text("")
    (tmp_path / "target").mkdir()
    copy_beside(folder, tmp_path / "target")
    assert json.loads((tmp_path / "target" / path.name).read_text()) == raw
    assert not (tmp_path / "target" / "own.py").exists()


def test_a_tokenizer_that_is_code_alone_is_refused_as_a_copy_too(folder: Path, tmp_path: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": ["own.Own", None]}}))
    (folder / "tokenizer.json").rename(folder / "tiktoken.model")
    (tmp_path / "target").mkdir()
    copy_beside(folder, tmp_path / "target")
    for each in (folder, tmp_path / "target"):
        with pytest.raises(UserError, match="its tokenizer is code that came with it"):
            load_tokenizer(each)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "generation_config.json"])
def test_a_link_that_leads_nowhere_is_refused_with_the_config(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(folder / "nowhere")
    for read in (load_model_config, files_beside):
        with pytest.raises(UserError, match=rf"{name} is a link that leads nowhere"):
            read(folder)


def test_a_file_that_may_not_be_read_is_refused_with_the_config(folder: Path) -> None:
    (folder / "tokenizer.json").chmod(0)
    for read in (load_model_config, files_beside):
        with (
            without_privileges(),
            pytest.raises(UserError, match=r"tokenizer\.json cannot be read \(Permission denied\)"),
        ):
            read(folder)
