"""Safetensors files of an HF folder: what is in them, and whether it is what the config promises. Without torch."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.core.errors import UserError
from megarl.models.config import ModelConfig

SHOWN = 5
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")
MAX_HEADER_BYTES = 100 * 2**20
MAX_PREDICTION_LAYERS = 8


@dataclass(frozen=True)
class TensorInfo:
    """One tensor on disk."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: F32, BF16
    file: Path
    offset: int  # of the first byte in the file


def read_index(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the model's files, from the headers alone. Raises UserError for files missing, broken or cut off."""
    found: dict[str, TensorInfo] = {}
    for path in weight_files(folder):
        header, data = _header(path)
        for name, entry in header.items():
            found[name] = TensorInfo(tuple(entry["shape"]), entry["dtype"], path, data + entry["data_offsets"][0])
    return found


def weight_files(folder: Path) -> list[Path]:
    """The files that make up the model: folders may hold the same weights in another form beside them.

    Raises UserError when the index names a file that is missing, or when an index stands beside a whole model: which of
    the two counts is not the same in every library.
    """
    single, index = folder / SINGLE, folder / INDEX
    if not index.exists():
        return [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    try:
        named = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{index} is not an index of safetensors files. Export the model again.") from error
    missing = [name for name in named if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{index} names files that are not there: {some(missing)}. Copy or export the model again.")
    if single.exists() and SINGLE not in named:
        raise UserError(f"{folder} holds {SINGLE} and an index of other files ({INDEX}). Remove what is out of date.")
    return [folder / name for name in named]


def check_weights(expected: dict[str, tuple[int, ...]], folder: Path, config: ModelConfig) -> dict[str, TensorInfo]:
    """The index of a folder whose weights are those that the config describes.

    expected: HF name -> shape. Raises UserError, with names and shapes, when they are not. What megarl has no use for is
    no mistake: see `_unused`.
    """
    index = read_index(folder)
    missing = sorted(set(expected) - set(index))
    extra = sorted(set(index) - set(expected) - _unused(index, config))
    shapes = [
        f"{name} is {list(index[name].shape)}, the config says {list(shape)}"
        for name, shape in expected.items()
        if name in index and index[name].shape != shape
    ]
    kinds = [
        f"{name} is {index[name].dtype}, supported are {', '.join(DTYPES)}"
        for name in expected
        if name in index and index[name].dtype not in DTYPES
    ]
    found = {"missing": missing, "not in the config": extra, "of another shape": shapes, "of another type": kinds}
    problems = [f"{what}: {some(names)}" for what, names in found.items() if names]
    if problems:
        raise UserError(
            f"The weights in {folder} do not match its config.json. {'; '.join(problems)}. "
            "The folder mixes two models, or an export was cut short: export it again."
        )
    return index


def _unused(index: dict[str, TensorInfo], config: ModelConfig) -> set[str]:
    """Tensors that are neither needed nor a sign of another model; an export does not have them.

    A stored copy of a tied head; rotary frequencies, which the config gives; and the layers behind the last that predict
    further tokens (DeepSeek-V3's multi-token prediction, known by their `eh_proj`), which transformers leaves out too.
    """
    layers = range(config.num_layers, config.num_layers + MAX_PREDICTION_LAYERS)
    extra = [f"model.layers.{i}." for i in layers if f"model.layers.{i}.eh_proj.weight" in index]
    unused = {name for name in index if name.endswith("rotary_emb.inv_freq") or name.startswith(tuple(extra))}
    return unused | ({"lm_head.weight"} if config.tied_embeddings else set())


def some(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The entry of each tensor, and where in the file the data begin."""
    with path.open("rb") as file:
        start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < size <= MAX_HEADER_BYTES:
            raise UserError(f"{path} is not a safetensors file: its header is missing. Export the model again.")
        try:
            header: dict[str, Any] = json.loads(file.read(size))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{path} is not a safetensors file: its header is broken. Export the model again."
            ) from error
    if path.stat().st_size < 8 + size + end:
        raise UserError(f"{path} is cut off: {path.stat().st_size} bytes of {8 + size + end}. Copy or export it again.")
    return header, 8 + size
