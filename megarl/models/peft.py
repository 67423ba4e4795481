"""Writes LoRA adapters as the `peft` library and inference servers load them: one file of tensors, one of settings.

HF has several linears where Megatron has one. Each gets its rows of B, as the rules of the weights say, and a copy of A:
their product is the same. Where HF has one parameter of all experts, PEFT has one A and one B of them (its
`target_parameters`). Import after `models.bootstrap`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module

from megarl.core.disk import FULL, sync, sync_tree
from megarl.core.errors import UserError
from megarl.core.layout import Layout
from megarl.models.config import ModelConfig
from megarl.models.hf_gather import Gatherer, export_buckets
from megarl.models.hf_weights import Value, layer_spec
from megarl.models.lora_settings import LoraSettings, linear_of, target_of
from megarl.models.multimodal import whole_name
from megarl.models.rules import LayerSpec, Rule, Slot, Source, rules

BUCKET_BYTES = 2**26
LAYERS = "decoder.layers."
MODEL = "base_model.model."  # PEFT's name of what has adapters
TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def save_peft(
    chunks: Sequence[Module],
    config: ModelConfig,
    settings: LoraSettings,
    layout: Layout,
    rank: int,
    group: dist.ProcessGroup | None,
    folder: Path,
    *,
    base_model: str,
) -> None:
    """Write the adapters of all ranks to a folder, which appears whole and replaces an earlier one of that name.

    Collective over `group` (None: there is one rank), as gathering is; rank 0 writes. base_model: the name or the
    folder of the HF model that the adapters belong to.
    """
    tensors = peft_tensors(chunks, config, settings, layout, rank, group)
    if config.vision is not None:
        tensors = {f"{MODEL}{whole_name(name.removeprefix(MODEL), newer=True)}": each for name, each in tensors.items()}
    if rank != 0:
        return
    temporary = folder.with_name(f".tmp-{folder.name}")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    try:
        save_file(tensors, temporary / TENSORS, metadata={"format": "pt"})
        text = json.dumps(peft_config(config, settings, base_model), indent=2)
        (temporary / CONFIG).write_text(text + "\n")
        shutil.copymode(temporary / CONFIG, temporary / TENSORS)  # safetensors lets nobody read but this user
        sync_tree(temporary)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary)
        if not _is_full(error):
            raise
        raise UserError(
            f"The disk of {folder} is full, and the adapters were not written to it ({error}). Free some space there or choose "
            "another folder; nothing was left behind."
        ) from error
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)
    sync(folder.parent)


def _is_full(error: Exception) -> bool:
    """The safetensors library tells the system's number in words."""
    if isinstance(error, OSError):
        return error.errno in FULL
    return any(f"(os error {number})" in str(error) for number in FULL)


def peft_tensors(
    chunks: Sequence[Module],
    config: ModelConfig,
    settings: LoraSettings,
    layout: Layout,
    rank: int,
    group: dist.ProcessGroup | None,
    *,
    value: Value | None = None,
) -> dict[str, Tensor]:
    """Name in PEFT's files -> whole tensor, on the CPU: A is [rank, in], B is [out, rank]. Empty but on rank 0.

    Collective over `group`. value: what to export in an adapter's place, such as its gradient.
    """
    found: dict[str, Tensor] = {}
    adapted = list(adapted_rules(config, settings, layer_spec(chunks)))
    needed = [rule for weight in adapted for rule in factor_rules(weight, settings.rank)]
    gatherer = Gatherer(chunks, config, layout, rank, group, value, exported=needed)
    for bucket in export_buckets(gatherer, BUCKET_BYTES):
        found.update({name: tensor.to("cpu", copy=True).contiguous() for name, tensor in bucket})
    for weight in adapted if found else []:
        first, *others = (_peft_name(source.name, "lora_A") for source in weight.sources)
        # Each its own memory: safetensors refuses to write what is shared.
        found.update({name: found[first].clone() for name in others if name != first})
    for weight in adapted if found else []:
        if weight.expert == 0 and weight.sources[0].slot is not None:
            _flatten(found, weight, settings)
    return found


def _flatten(found: dict[str, Tensor], weight: Rule, settings: LoraSettings) -> None:
    """Of a weight within a parameter of all experts: bring A and B of that into PEFT's form.

    A [experts, rank, in] becomes [experts x rank, in]; B [out, rank, experts], in which order it is not held,
    [out, rank x experts]. A module that has two such parameters is wrapped twice, the second around the first.
    """
    source = weight.sources[0]
    assert source.slot is not None, weight.megatron
    module, _, parameter = source.name.rpartition(".")
    is_inner = parameter != "weight" and "experts.linear_fc2" in settings.targets
    is_inner = is_inner and target_of(linear_of(weight)) == "experts.linear_fc1"
    wrapped = f"{module}.base_layer" if is_inner else module
    lora_a, lora_b = (found.pop(_peft_name(source.name, factor)) for factor in ("lora_A", "lora_B"))
    order = (1, 2, 0) if source.slot.as_rows else (2, 1, 0)
    found[_peft_name(wrapped, "lora_A")] = lora_a.flatten(0, 1)
    found[_peft_name(wrapped, "lora_B")] = lora_b.permute(order).flatten(1, 2).contiguous()


def peft_config(config: ModelConfig, settings: LoraSettings, base_model: str) -> dict[str, Any]:
    """The content of adapter_config.json."""
    whole_alpha = int(settings.alpha) if float(settings.alpha).is_integer() else settings.alpha
    stacked = {
        _behind_layer(source)
        for rule in adapted_rules(config, settings, "torch")
        for source in rule.sources
        if source.slot is not None
    }
    return {
        "peft_type": "LORA",
        # PEFT would look for a trained copy of the head with SEQ_CLS; the base model has it.
        "task_type": None if config.head == "score" else "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": settings.rank,
        "lora_alpha": whole_alpha,
        "lora_dropout": 0.0,
        "target_modules": _target_modules(config, settings),  # where it is null PEFT chooses some
        **({"target_parameters": sorted(stacked)} if stacked else {}),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    }


def _target_modules(config: ModelConfig, settings: LoraSettings) -> list[str] | str:
    """What PEFT shall match the ends of module names with: no more than a last part, where that hits no other linear.

    Of a model that sees images it is an expression for whole names: linears of its tower are called like others.
    """
    found = dict[bool, set[str]]({True: set(), False: set()})
    for rule in rules(config, "torch"):
        linear = linear_of(rule)
        if LAYERS in linear:
            paths = {_behind_layer(source).removesuffix(".weight") for source in rule.sources if source.slot is None}
            found[target_of(linear) in settings.targets] |= paths
    others = {path.rpartition(".")[2] for path in found[False]}
    lasts = {path: path.rpartition(".")[2] for path in found[True]}
    ends = sorted({path if last in others else last for path, last in lasts.items()})
    return ends if config.vision is None else rf".*\.language_model\.layers\..*\.({'|'.join(ends)})"


def _behind_layer(source: Source) -> str:
    """HF's name of the tensor within its layer: what is behind `model.layers.N.`"""
    return source.name.split(".", maxsplit=3)[3]


def adapted_rules(config: ModelConfig, settings: LoraSettings, spec: LayerSpec) -> Iterator[Rule]:
    """The rules of the weights that have adapters."""
    return (rule for rule in rules(config, spec) if target_of(linear_of(rule)) in settings.targets)


def factor_rules(weight: Rule, rank: int) -> tuple[Rule, Rule]:
    """The rules of A and B: A has the columns of the weight, and B its rows, in the same order and cut the same way."""
    first, (linear, _, kind) = weight.sources[0], weight.megatron.rpartition(".")
    each = kind.removeprefix("weight")  # the expert's number, where one linear is of all
    lora_a = replace(
        weight,
        megatron=f"{linear}.lora_a{each}",
        sources=(_source_of_a(first, rank),),
        cut="columns" if weight.cut == "columns" else "whole",
        rounds=1,
    )
    lora_b = replace(
        weight,
        megatron=f"{linear}.lora_b{each}",
        sources=tuple(_source_of_b(source, rank) for source in weight.sources),
        cut="rows" if weight.cut == "rows" else "whole",
    )
    return lora_a, lora_b


def _source_of_a(weight: Source, rank: int) -> Source:
    """A of all experts is [experts, rank, in], however their weights lie."""
    shape, slot = (rank, weight.shape[1]), weight.slot
    stacked = None if slot is None else Slot((slot.shape[0], *shape), slot.expert, 0, as_rows=True)
    return Source(_peft_name(weight.name, "lora_A"), shape, slot=stacked)


def _source_of_b(weight: Source, rank: int) -> Source:
    """B of all experts lies as their weights do, `rank` in the place of what goes in."""
    name, slot = _peft_name(weight.name, "lora_B"), weight.slot
    if slot is not None:
        experts, rows, columns = slot.shape
        slot = replace(slot, shape=(experts, rows, rank) if slot.as_rows else (experts, rank, columns))
    return replace(weight, name=name, shape=(weight.shape[0], rank), slot=slot)


def _peft_name(weight: str, factor: str) -> str:
    return f"{MODEL}{weight.removesuffix('.weight')}.{factor}.weight"
