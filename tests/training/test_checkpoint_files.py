"""What of a checkpoint's `.metadata` is read, and what is refused."""

import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from megarl.core.errors import UserError
from megarl.models.bootstrap import prepare_megatron
from tests.support.platforms import chosen

prepare_megatron(chosen())
from megarl.training import checkpoint_files  # noqa: E402


class Early(pickle.Pickler):
    """As Python 3.11.2 pickles members of enumerations."""

    def reducer_override(self, thing: Any) -> Any:
        return (getattr, (type(thing), thing.name)) if isinstance(thing, Enum) else NotImplemented


class Hidden:
    """Pickled as an attribute of something that is no enumeration."""

    def __reduce__(self) -> Any:
        return getattr, (Metadata, "__init__")


def write(folder: Path, content: Any) -> None:
    with (folder / ".metadata").open("wb") as file:
        Early(file).dump(content)


def test_members_of_enumerations_are_read_as_each_python_pickles_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's memory formats are such: on Debian 12's Python no checkpoint could be read back."""
    stored = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([2]), [])
    write(tmp_path, Metadata({"weight": stored}))
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    monkeypatch.setattr(checkpoint_files, "log", None)  # nothing was broken: nothing is told
    checkpoint_files.check_metadata(tmp_path)


def test_attributes_of_anything_else_are_refused(tmp_path: Path) -> None:
    write(tmp_path, Metadata({"weight": Hidden()}))  # type: ignore[dict-item]
    with pytest.raises(UserError, match=r"it names __init__ of .*, which is nothing that a checkpoint is made of"):
        checkpoint_files.check_metadata(tmp_path)
