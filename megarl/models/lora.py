"""Low-rank adapters (LoRA, arXiv 2106.09685) on Megatron's linear layers, at any tensor-parallel size.

A weight W [out, in] becomes W + alpha / rank * B @ A, with A [rank, in] and B [out, rank]; W is frozen. What travels
between tensor-parallel ranks is A's output, `rank` numbers a token. Parameters keep their names, and adapters stand
beside them (`linear_qkv.weight`, `linear_qkv.lora_a`, `linear_qkv.lora_b`), so that weights are loaded and exported as
ever. With `adapters_off` the model is its own reference. What an adapted linear computes is in low_rank.py, export in
peft.py. Import after `models.bootstrap`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor
from torch.nn import Module, Parameter

from megarl.core.errors import UserError
from megarl.models.all_gather import all_gather_objects
from megarl.models.lora_settings import TARGETS, LoraSettings, is_routed, target_of
from megarl.models.low_rank import LORA_A, LORA_B, Adapted, Adapter, GroupedLowRank, LowRank
from megarl.models.rule_table import Cut

# Layers, and experts where each is a module: they count from 0 on every rank.
NUMBERED = re.compile(r"(^decoder\.layers|\.mlp\.experts\.local_experts)\.\d+")


def add_adapters(chunks: Sequence[Module], settings: LoraSettings, groups: ProcessGroupCollection, seed: int) -> None:
    """Freeze the model and give every target linear adapters, in place. Collective over the pipeline.

    chunks: this rank's GPTModels, weights loaded. A is Kaiming-uniform and B zero, as in PEFT: nothing changes yet. A
    depends on the seed and the linear's global name alone, not on the layout.
    Raises UserError, on every rank, when a target is not in the model, or a pipeline stage has none at all.
    """
    _check_targets(chunks, settings, groups.pp)
    for chunk in chunks:
        chunk.requires_grad_(False)
        for name, linear in _linears(chunk, settings.targets):
            _adapt(linear, name, settings, groups, seed)
        if getattr(chunk, "pre_process", False):
            # A layer whose input needs no gradient would give none, where its activations are computed again.
            chunk.get_submodule("embedding").register_forward_hook(_require_grad)


@contextmanager
def adapters_off(chunks: Sequence[Module]) -> Iterator[None]:
    """Within the block the model is exactly the one without adapters; behind it, what it was before. Nests."""
    adapters = [linear.adapter for chunk in chunks for _, linear in _adapted(chunk)]
    before = [adapter.is_on for adapter in adapters]
    try:
        for adapter in adapters:
            adapter.is_on = False
        yield
    finally:
        for adapter, was_on in zip(adapters, before, strict=True):
            adapter.is_on = was_on


def merged(chunks: Sequence[Module]) -> Callable[[str, Tensor], Tensor]:
    """For `Gatherer(..., value=)`: adapted weights with their adapters in them, everything else as it is."""
    adapted = {
        weight: (linear.adapter, lora_a, lora_b)
        for chunk in chunks
        for name, linear in _adapted(chunk)
        for weight, lora_a, lora_b in linear.factors(name)
    }

    def value(name: str, tensor: Tensor) -> Tensor:
        if name not in adapted:
            return tensor
        adapter, lora_a, lora_b = adapted[name]
        return adapter.merge(tensor, lora_a, lora_b)

    return value


def initial_a(rank: int, width: int, seed: int, name: str) -> Tensor:
    """A whole A, [rank, width] float32: uniform within 1 / sqrt(width), which is PEFT's Kaiming with a = sqrt(5)."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    random = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.empty(rank, width).uniform_(-(width**-0.5), width**-0.5, generator=random)


def _adapt(linear: Any, name: str, settings: LoraSettings, groups: ProcessGroupCollection, seed: int) -> None:
    """Turn one linear into an adapted one. name: global."""
    routed = is_routed(name)
    cut, group = _cut(linear, name), groups.expt_tp if routed else groups.tp
    is_sequence_parallel = bool(linear.config.sequence_parallel) and dist.get_world_size(group) > 1 and not routed
    is_gated = bool(linear.config.gated_linear_unit) and name.endswith("linear_fc1")
    adapter = Adapter(settings.scale, cut, group, is_sequence_parallel, is_gated, routed)
    weights = [("", name, linear.weight)] if hasattr(linear, "weight") else list(_of_experts(linear, name, groups))
    kind: type[Module] = type(linear)
    linear.__class__ = _adapted_class(kind)  # type: ignore[arg-type]
    linear.adapter = adapter
    for ending, whole_name, weight in weights:
        for factor, parameter in _new_factors(weight, whole_name, adapter, settings.rank, seed):
            linear.register_parameter(f"{factor}{ending}", parameter)
    if hasattr(linear, "layer_norm_weight"):
        linear.return_layernorm_output = True


def _of_experts(linear: Any, name: str, groups: ProcessGroupCollection) -> Iterator[tuple[str, str, Parameter]]:
    """Of a linear of all of a rank's experts: for each its number there, the name that it has alone, and its weight."""
    experts, _, last = name.rpartition(".")
    first = dist.get_rank(groups.ep) * linear.num_gemms
    for each in range(linear.num_gemms):
        yield str(each), f"{experts}.local_experts.{first + each}.{last}", getattr(linear, f"weight{each}")


def _new_factors(
    weight: Parameter, name: str, adapter: Adapter, rank: int, seed: int
) -> Iterator[tuple[str, Parameter]]:
    """A and B of a weight, which carry the marks that Megatron asks for.

    tensor_model_parallel: a part of a tensor; others are the same on every rank, and count once in the gradient's norm.
    sequence_parallel: gradients are of this rank's tokens, and Megatron sums them over the tensor-parallel ranks.
    allreduce: gradients are summed over the ranks that hold the same dense weights, not the same experts.
    shared: another rank counts it. Megatron looks for copies among tensor-parallel ranks, which hold other experts.
    """
    (rows, columns), cut, size = weight.shape, adapter.cut, dist.get_world_size(adapter.group)
    whole = initial_a(rank, columns * size if cut == "columns" else columns, seed, name)
    part = whole.chunk(size, dim=1)[dist.get_rank(adapter.group)] if cut == "columns" else whole
    factors = {LORA_A: part.to(weight, copy=True), LORA_B: weight.new_zeros(rows, rank)}
    for factor, tensor in factors.items():
        parameter, dim = Parameter(tensor.contiguous()), 1 if factor == LORA_A else 0
        is_cut = cut == ("columns" if factor == LORA_A else "rows")
        counts = is_cut or adapter.is_routed
        set_tensor_model_parallel_attributes(parameter, counts, dim if counts else -1, 1)
        marks = {
            "allreduce": not adapter.is_routed,
            "sequence_parallel": adapter.is_sequence_parallel and not is_cut,
            "shared": adapter.is_routed and not is_cut and dist.get_rank(adapter.group) > 0,
        }
        for mark, holds in marks.items():
            setattr(parameter, mark, holds)
        yield factor, parameter


@cache
def _adapted_class(kind: type[Module]) -> type[Module]:
    """A class of the linear's own kind, with adapters before Megatron's part of it.

    What megarl itself puts behind a linear's output, such as a norm, then comes behind the adapters' output too.
    """
    core = next(base for base in kind.__mro__ if base.__module__.startswith("megatron.core."))
    gained = GroupedLowRank if core.__name__.endswith("GroupedLinear") else LowRank
    adapted: type[Module] = type(f"LowRank{core.__name__}", (gained, core), {})
    return adapted if core is kind else type(f"LowRank{kind.__name__}", (kind, adapted), {})


def _cut(linear: Any, name: str) -> Cut:
    """How a linear's weight is cut. Transformer Engine's say it by their mode, and have none where each rank holds all.

    Those of experts have none, however they are cut.
    """
    if is_routed(name):
        return "rows" if name.endswith("linear_fc1") else "columns"
    if isinstance(linear, ColumnParallelLinear):
        return "rows"
    if isinstance(linear, RowParallelLinear):
        return "columns"
    cuts: dict[str | None, Cut] = {"column": "rows", "row": "columns", None: "whole"}
    return cuts[linear.parallel_mode]


def _require_grad(_: Module, __: Any, output: Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_()


def _named(chunk: Module) -> Iterator[tuple[str, Module]]:
    """A chunk's modules by global name: layers and experts are counted over the whole model."""
    numbers = dict[str, int]()
    for name, module in chunk.named_modules():  # those that contain others come before them
        some: Any = module
        if re.fullmatch(r"decoder\.layers\.\d+", name):
            numbers[name] = some.layer_number - 1
        elif name.endswith(".mlp.experts") and hasattr(module, "local_experts"):
            first = dist.get_rank(some.ep_group) * some.num_local_experts
            numbers |= {f"{name}.local_experts.{each}": first + each for each in range(some.num_local_experts)}
        yield _global_name(name, numbers), module


def _global_name(name: str, numbers: dict[str, int]) -> str:
    """numbers: of layers and experts in the whole model, by their names on this rank."""
    return NUMBERED.sub(lambda match: f"{match[1]}.{numbers[name[: match.end()]]}", name)


def _linears(chunk: Module, targets: Sequence[str]) -> Iterator[tuple[str, Module]]:
    for name, module in list(_named(chunk)):
        if target_of(name) in targets:
            yield name, module


def _adapted(chunk: Module) -> Iterator[tuple[str, Adapted]]:
    for name, module in _named(chunk):
        if isinstance(module, Adapted):
            yield name, module


def _check_targets(chunks: Sequence[Module], settings: LoraSettings, pp: dist.ProcessGroup) -> None:
    mine = {target_of(name) for chunk in chunks for name, _ in _named(chunk)}.intersection(TARGETS)
    stages = all_gather_objects(mine, pp)
    found = set[str]().union(*stages)
    if missing := [target for target in settings.targets if target not in found]:
        possible = ", ".join(target for target in TARGETS if target in found)
        raise UserError(f"The model has no {', '.join(missing)}: choose LoRA's targets among {possible}.")
    empty = [index for index, stage in enumerate(stages) if not stage.intersection(settings.targets)]
    if empty:
        raise UserError(
            f"Pipeline stage {empty[0]} has none of LoRA's targets {', '.join(settings.targets)}, and so nothing to train: "
            f"add one that every layer has, such as linear_proj."
        )
