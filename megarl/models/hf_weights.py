"""Weights between HF folders and a Megatron model: each rank reads only its part; exports go bucket by bucket."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module

from megarl.core.disk import sync, sync_tree
from megarl.core.errors import MegarlError, UserError
from megarl.models.config import ModelConfig
from megarl.models.hf_files import read_index
from megarl.models.mapping import join, merge, split
from megarl.models.rules import LOCAL_NAMES, TRANSFORMER_ENGINE_NAMES, NameTable, Rule, rules, slices

Bucket = list[tuple[str, Tensor]]

CONFIG = "config.json"
COPIED = (
    "generation_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
)
COPIED_PATTERNS = ("tokenizer*", "vocab.*", "merges.txt")
DEFAULT_SHARD_BYTES = 5 * 2**30


def name_table(model: Module) -> NameTable:
    """Which names the model's layer spec gave its norms."""
    fused = any(name.endswith("linear_qkv.layer_norm_weight") for name, _ in model.named_parameters())
    return TRANSFORMER_ENGINE_NAMES if fused else LOCAL_NAMES


def load_hf_weights(model: Module, config: ModelConfig, folder: Path, tp_rank: int, tp_size: int) -> None:
    """Fill every parameter of this rank's part, cast to the parameter's dtype. Files are mapped; only slices are read.

    Raises UserError for tensors that are missing, MegarlError for parameters and rules that do not meet.
    """
    parameters = dict(model.named_parameters())
    index = read_index(folder)
    files = {path: safe_open(path, framework="pt") for path in {info.file for info in index.values()}}
    for rule in rules(config, name_table(model)):
        missing = [name for name in rule.hf if name not in index]
        if missing:
            raise UserError(f"{folder} lacks the tensors {', '.join(missing)}: export the model again.")
        tensors = [
            files[index[name].file].get_slice(name)[part]
            for name, part in zip(rule.hf, slices(rule, config, tp_rank, tp_size), strict=True)
        ]
        part = merge(rule, tensors, config, tp_size)
        parameter = parameters.pop(rule.megatron, None)
        if parameter is None or parameter.shape != part.shape:
            found = "is not there" if parameter is None else f"has shape {list(parameter.shape)}"
            raise MegarlError(f"The model's parameter {rule.megatron} {found}; its rule gives {list(part.shape)}.")
        with torch.no_grad():
            parameter.copy_(part)
    if parameters:
        raise MegarlError(f"No rule fills the parameters {sorted(parameters)} of family {config.family}.")


def export_buckets(
    model: Module, config: ModelConfig, tp_group: dist.ProcessGroup | None, bucket_bytes: int
) -> Iterator[Bucket]:
    """The whole model under HF names, gathered over tensor parallel, at most about `bucket_bytes` at a time.

    Every rank of the group has to take every bucket (gathering is collective) and gets the full tensors. A tensor larger
    than the limit is a bucket of its own. Tied output layers and vocabulary padding are left out.
    """
    parameters = dict(model.named_parameters())
    bucket: Bucket = []
    size = 0
    for rule in rules(config, name_table(model)):
        part = parameters[rule.megatron].detach()
        for name, tensor in split(rule, _gather(rule, part, tp_group), config):
            if bucket and size + tensor.nbytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += tensor.nbytes
    if bucket:
        yield bucket


def _gather(rule: Rule, part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    size = dist.get_world_size(group) if group is not None else 1
    if size == 1 or rule.cut == "whole":
        return part
    parts = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(parts, part.contiguous(), group=group)
    return join(rule, parts)


def save_hf(
    buckets: Iterable[Bucket],
    config: ModelConfig,
    source_folder: Path,
    target_folder: Path,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write an HF folder that transformers loads: safetensors (with an index where there are several), config, tokenizer.

    Tensors keep the dtype that they come in, and the config names it. The rest of the config, generation settings and
    tokenizer are the source folder's. Appears whole, by renaming; an earlier folder of that name is replaced.
    """
    temporary, previous = (target_folder.with_name(f".{kind}-{target_folder.name}") for kind in ("tmp", "previous"))
    for folder in (temporary, previous):
        if folder.exists():
            shutil.rmtree(folder)
    temporary.mkdir(parents=True)
    dtype = _write_shards(buckets, temporary, max_shard_bytes)
    if dtype is None:
        raise MegarlError(
            f"Nothing was exported to {target_folder}: the model of family {config.family} gave no tensors."
        )
    _write_config(source_folder / CONFIG, temporary / CONFIG, dtype)
    for path in sorted(source_folder.iterdir()):
        if path.name in COPIED or any(path.match(pattern) for pattern in COPIED_PATTERNS):
            shutil.copyfile(path, temporary / path.name)
    sync_tree(temporary)
    if target_folder.exists():
        target_folder.rename(previous)
    temporary.rename(target_folder)
    sync(target_folder.parent)
    if previous.exists():
        shutil.rmtree(previous)


def _write_config(source: Path, target: Path, dtype: torch.dtype) -> None:
    """The source's config under the dtype of the weights: a reader casts to what the config says, and would round."""
    raw = json.loads(source.read_text())
    name = str(dtype).removeprefix("torch.")
    raw.update({key: name for key in ("dtype", "torch_dtype") if key in raw} or {"dtype": name})
    target.write_text(json.dumps(raw, indent=2) + "\n")


def _write_shards(buckets: Iterable[Bucket], folder: Path, max_shard_bytes: int) -> torch.dtype | None:
    """Tensors in files of at most about so many bytes; returns the dtype of the first, None when there are none."""
    place: dict[str, int] = {}
    sizes: list[int] = []
    dtype: torch.dtype | None = None
    pending: dict[str, Tensor] = {}

    def flush() -> None:
        if pending:
            save_file(pending, folder / f"part-{len(sizes)}.safetensors", metadata={"format": "pt"})
            place.update(dict.fromkeys(pending, len(sizes)))
            sizes.append(sum(tensor.nbytes for tensor in pending.values()))
            pending.clear()

    for bucket in buckets:
        for name, tensor in bucket:
            if pending and sum(each.nbytes for each in pending.values()) + tensor.nbytes > max_shard_bytes:
                flush()
            dtype = dtype or tensor.dtype
            # A copy: parameters may share memory, which safetensors refuses, and the bucket's own may be used again.
            pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
    flush()
    count = len(sizes)
    names = (
        ["model.safetensors"] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    )
    for index, name in enumerate(names):
        (folder / f"part-{index}.safetensors").rename(folder / name)
    if count > 1:
        weight_map = {name: names[index] for name, index in place.items()}
        text = json.dumps({"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}, indent=1)
        (folder / "model.safetensors.index.json").write_text(text)
    return dtype
