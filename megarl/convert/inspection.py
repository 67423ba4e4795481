"""What a model on disk holds, told from its manifest, or from the headers of its files. Without torch."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megarl.convert.source import Source, find_source
from megarl.core.errors import DamageError, UserError
from megarl.core.json_file import read_object
from megarl.models.carried import carried
from megarl.models.config import ModelConfig
from megarl.models.hf_files import TensorInfo, check_index, content_bytes, of_model, read_index
from megarl.models.rules import expected_tensors
from megarl.training.manifest import Manifest, TensorEntry, read_manifest, read_model_config, read_saved_config
from megarl.training.run_checkpoints import STATE

OPTIMIZER_PREFIX = "optimizer."


@dataclass(frozen=True)
class Inspection:
    """One model on disk.

    damage: what is wrong with its files; empty where they are whole. parameters: of the model. step: optimizer steps
    done. layout: what wrote it. optimizer: its name. recipe: of the run that it belongs to. tensors: whole ones, by name.
    carried: those that are not trained, and go along with the model; a checkpoint has them beside its tensors, an HF folder among
    them. files: relative path to size. What is None is not known or not there.
    """

    path: Path
    kind: Literal["hf", "mcore"]
    damage: list[str]
    family: str
    architecture: str
    sizes: dict[str, int]
    parameters: int
    dtype: str
    step: int | None
    run_step: int | None
    layout: str | None
    optimizer: str | None
    lora: dict[str, Any] | None
    recipe: str | None
    versions: dict[str, str]
    tensors: dict[str, TensorEntry]
    carried: dict[str, TensorEntry]
    files: dict[str, int]

    def to_json(self) -> str:
        """For programs."""
        return json.dumps(asdict(self) | {"whole": not self.damage, "bytes": sum(self.files.values())}, default=str)


def inspect(path: Path, *, read: bool = True) -> Inspection:
    """Look at an HF folder, a checkpoint or a run. read: compare all content with the checksums, not sizes alone.

    Raises UserError where there is no model, or one that megarl does not know; DamageError where so much is damaged that it
    cannot be told what there was.
    """
    source = find_source(path, read=read)
    if source.kind == "hf":
        return _inspect_hf(source, read_model_config(source.hf))
    manifest = read_manifest(source.folder)
    try:
        config = read_saved_config(source.hf)
    except UserError as error:  # it was written with one that could be read
        raise DamageError(str(error)) from error
    return _inspect_mcore(source, manifest, config, read=read)


def _inspect_mcore(source: Source, manifest: Manifest, config: ModelConfig, *, read: bool) -> Inspection:
    model = {name: entry for name, entry in manifest.tensors.items() if not name.startswith(OPTIMIZER_PREFIX)}
    damage = source.damage(read=read)
    return Inspection(
        path=source.folder,
        kind="mcore",
        damage=damage,
        family=manifest.family,
        architecture=manifest.architecture,
        sizes=_sizes(config),
        parameters=sum(math.prod(entry.shape) for entry in model.values()),
        dtype=manifest.dtype,
        step=manifest.step,
        run_step=_run_step(source),
        layout=str(manifest.layout),
        optimizer=str(manifest.optimizer.get("name", "unknown")) if manifest.optimizer else None,
        lora=manifest.lora,
        recipe=_recipe_name(source),
        versions=manifest.versions,
        tensors=manifest.tensors,
        carried=_entries({} if damage else carried(source.hf, config)),
        files={name: each.bytes for name, each in manifest.files.items()},
    )


def _inspect_hf(source: Source, config: ModelConfig) -> Inspection:
    index, along, damage = dict[str, TensorInfo](), dict[str, TensorInfo](), []
    try:
        index = read_index(source.folder)
        check_index(expected_tensors(config), of_model(index, source.folder, config), source.folder, config)
        along = carried(source.folder, config)
    except UserError as error:
        damage.append(str(error).rstrip("."))
    tensors = _entries(index)
    dtypes = Counter(entry.dtype for entry in tensors.values())
    return Inspection(
        path=source.folder,
        kind="hf",
        damage=damage,
        family=config.family,
        architecture=config.architecture,
        sizes=_sizes(config),
        parameters=sum(math.prod(entry.shape) for entry in tensors.values()),
        dtype=", ".join(dtypes),
        step=None,
        run_step=None,
        layout=None,
        optimizer=None,
        lora=None,
        recipe=None,
        versions={},
        tensors=tensors,
        carried=_entries(along),
        files={path.name: path.stat().st_size for path in sorted(source.folder.iterdir()) if path.is_file()},
    )


def _entries(index: Mapping[str, TensorInfo]) -> dict[str, TensorEntry]:
    return {name: TensorEntry(info.shape, info.dtype, content_bytes(info)) for name, info in sorted(index.items())}


def _run_step(source: Source) -> int | None:
    if source.step is None:
        return None
    try:
        step = read_object(source.step / STATE, "The checkpoint is damaged.").get("step")
    except UserError:
        return None  # told as damage
    return step if isinstance(step, int) else None


def _recipe_name(source: Source) -> str | None:
    """The run's name. A recipe that cannot be read is no damage of the checkpoint: it has none of its content."""
    if source.recipe is None:
        return None
    try:
        run = yaml.safe_load(source.recipe.read_text())["run"]["name"]
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        return None
    return str(run)


def _sizes(config: ModelConfig) -> dict[str, int]:
    sizes = {
        "layers": config.num_layers,
        "hidden": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "ffn": config.ffn_hidden_size,
        "vocabulary": config.vocab_size,
    }
    return sizes | ({"experts": config.moe.num_experts} if config.moe else {})


def _carried_words(found: Inspection) -> str | None:
    if not found.carried:
        return None
    size = sum(each.bytes for each in found.carried.values())
    return f"{len(found.carried)} tensors, {size:,} bytes, not trained: a frozen vision tower, layers that predict further tokens"


def render(found: Inspection) -> RenderableType:
    """The same for people."""
    facts = Table.grid(padding=(0, 2))
    state = Text("damaged: " + "; ".join(found.damage), style="bold red") if found.damage else Text("whole")
    if found.kind == "hf" and not found.damage:
        state = Text("not checked (HF folders have no checksums); headers and tensors are those of the config")
    rows: list[tuple[str, RenderableType | None]] = [
        ("path", str(found.path)),
        ("kind", {"hf": "HF folder", "mcore": "Megatron checkpoint"}[found.kind]),
        ("files", state),
        ("model", f"{found.family} ({found.architecture}), {found.parameters / 1e6:,.1f} M parameters, {found.dtype}"),
        ("sizes", ", ".join(f"{name} {size}" for name, size in found.sizes.items())),
        ("step", None if found.step is None else f"{found.step} optimizer steps"),
        ("run", None if found.run_step is None else f"{found.recipe or 'unknown recipe'}, step {found.run_step}"),
        ("written at", found.layout and f"{found.layout}; any layout can read it"),
        ("optimizer", found.optimizer or ("none: weights only" if found.kind == "mcore" else None)),
        ("adapters", str(found.lora) if found.lora else None),
        ("carried along", _carried_words(found)),
        ("versions", ", ".join(f"{name} {version}" for name, version in found.versions.items()) or None),
    ]
    for name, value in rows:
        if value is not None:
            facts.add_row(name, value)
    tensors = Table("tensor", "shape", "dtype", "bytes", title=f"{len(found.tensors)} tensors", title_justify="left")
    for name, entry in found.tensors.items():
        tensors.add_row(name, " x ".join(map(str, entry.shape)), entry.dtype, f"{entry.bytes:,}")
    total = f"{len(found.files)} files, {sum(found.files.values()):,} bytes"
    files = Table("file", "bytes", title=total, title_justify="left")
    for name, size in found.files.items():
        files.add_row(name, f"{size:,}")
    return Group(facts, tensors, files)
