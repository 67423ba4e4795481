"""`megarl.json`: what a Megatron checkpoint folder of megarl holds, and how to tell that it is whole. Without torch.

It lies beside Megatron's own files and is written last. `hf/` beside it has the HF config and tokenizer that the model
came with, so that an export to HF needs no other folder.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megarl.core.checksums import FileSum, file_damage
from megarl.core.errors import DamageError, UserError
from megarl.core.json_file import read_object
from megarl.core.layout import Layout
from megarl.models.config import ModelConfig
from megarl.models.hf_config import parse_model_config
from megarl.models.hf_dtypes import ModelDtype, StoredDtype
from megarl.models.rules import TOWER

MANIFEST, HF_FOLDER = "megarl.json", "hf"
CARRIED = "carried.safetensors"  # beside that config: tensors that are not trained (models/carried.py)
FORMAT = 1
UNFINISHED = "The checkpoint was not finished, is damaged, or is not one of megarl's."


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the checkpoint, whole: what all ranks hold of it together. dtype: as torch names it, without `torch.`."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """Content of megarl.json.

    family, architecture: of the model. dtype: of its weights. step: optimizer steps done. layout: what wrote the files;
    any other may read them. optimizer: its section of the recipe, None where there are only weights. total_steps: that
    its schedule was laid out for. lora: the adapters' section of the recipe. stored: HF tensors that came in another
    dtype than `dtype`, and are written back in it (models/hf_dtypes.py).
    newer_names: of the HF folder that a model with a vision tower in it is written back to (`Vision`).
    versions: of megarl, megatron-core and torch. tensors: by Megatron's global name. files: relative path to size and
    checksum, of everything but this file.
    """

    family: str
    architecture: str
    dtype: ModelDtype
    step: int
    layout: Layout
    optimizer: dict[str, Any] | None
    total_steps: int
    lora: dict[str, Any] | None
    versions: dict[str, str]
    tensors: dict[str, TensorEntry]
    files: dict[str, FileSum]
    stored: dict[str, StoredDtype] = field(default_factory=dict)
    newer_names: bool = False
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(each.bytes for each in self.files.values())

    @property
    def tower(self) -> dict[str, tuple[int, ...]]:
        """Of a vision tower that learned: names behind `visual.`, and shapes."""
        of_model = {name: each for name, each in self.tensors.items() if name.startswith(TOWER)}
        return {name.removeprefix(TOWER): each.shape for name, each in of_model.items()}

    def other_state(self, name: str, momentum: float, dtype: ModelDtype) -> dict[str, tuple[Any, Any]]:
        """Why the optimizer's state here is none of an optimizer like this: key of the recipe -> what it was, and what it is now.

        Adam's is the same whatever the dtype. SGD's has weights of its own where the model is bfloat16, and momentum where it
        has any. name, momentum: of the optimizer; dtype: of its model.
        """
        assert self.optimizer is not None
        saved, had = self.optimizer.get("name"), self.optimizer.get("momentum", 0.0)
        if saved != name:
            return {"optimizer.name": (saved, name)}
        if name != "sgd":
            return {}
        others = {"optimizer.momentum": (had, momentum)} if bool(had) != bool(momentum) else {}
        return others | ({"model.dtype": (self.dtype, dtype)} if self.dtype != dtype else {})

    def write(self, folder: Path) -> None:
        """Write it into a checkpoint's folder."""
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=1) + "\n")


PARSER = TypeAdapter(Manifest)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises DamageError where it is missing or broken, UserError of a later version of megarl."""
    path = folder / MANIFEST
    try:
        version = read_object(path, UNFINISHED).get("format")
    except UserError as error:
        raise DamageError(str(error)) from error
    if version != FORMAT:
        raise UserError(f"{path} has format {version}, and this megarl reads {FORMAT}: use the megarl that wrote it.")
    try:
        return PARSER.validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise DamageError(f"{path} is broken ({where}: {first['msg']}): the checkpoint is damaged.") from error


def read_model_config(folder: Path) -> ModelConfig:
    """The config of a folder that need not hold weights or a tokenizer. Raises UserError where it is broken."""
    path = folder / "config.json"
    return parse_model_config(read_object(path, "The model's folder is damaged: copy or write it again."), path)


def read_saved_config(folder: Path) -> ModelConfig:
    """The same of the HF_FOLDER of a checkpoint, as the model was that was saved: with a vision tower that learned with it.

    Of a folder that belongs to no checkpoint it is what config.json says. Raises UserError.
    """
    config = read_model_config(folder)
    if config.vision is None or folder.name != HF_FOLDER or not (folder.parent / MANIFEST).is_file():
        return config
    manifest = read_manifest(folder.parent)
    return config.with_tower(manifest.tower, newer_names=manifest.newer_names)


def checkpoint_damage(folder: Path, *, read: bool) -> list[str]:
    """What is wrong with a checkpoint folder, for people; empty where nothing is. read: also compare the content."""
    try:
        manifest = read_manifest(folder)
    except UserError as error:
        return [str(error).rstrip(".")]
    return file_damage(folder, manifest.files, read=read)
