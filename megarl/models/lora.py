"""Low-rank adapters (LoRA, arXiv 2106.09685) on Megatron's linear layers, at any tensor-parallel size.

A weight W [out, in] becomes W + alpha / rank * B @ A, with A [rank, in] and B [out, rank]; W is frozen. What travels
between tensor-parallel ranks is A's output, `rank` numbers a token. Parameters keep their names, and adapters stand
beside them (`linear_qkv.weight`, `linear_qkv.lora_a`, `linear_qkv.lora_b`), so that weights are loaded and exported as
ever. With `adapters_off` the model is its own reference. Export is in peft.py. Import after `models.bootstrap`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import Module, Parameter

from megarl.core.errors import UserError
from megarl.models.lora_settings import TARGETS, LoraSettings
from megarl.models.rule_table import Cut


@dataclass
class Adapter:
    """How one linear is adapted on this rank. cut: of its weight, and so of A (by columns) or of B (by rows)."""

    scale: float
    cut: Cut
    group: dist.ProcessGroup
    is_sequence_parallel: bool
    is_gated: bool  # rows are those of a gate, then those of what it lets through
    is_on: bool = True


class LowRank(Module):
    """What an adapted linear gains; it stands in the linear's class, before Megatron's own (see `_adapted_class`)."""

    adapter: Adapter
    lora_a: Parameter  # [rank, in], or this rank's columns
    lora_b: Parameter  # [out, rank], or this rank's rows

    def forward(self, input_: Tensor, *values: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """What the linear gives, plus scale * (input @ A.T) @ B.T. input_: [s, b, in]; returns [s, b, out] and its bias."""
        found = super().forward(input_, *values, **options)
        # A linear of Transformer Engine with a norm inside gives the norm's output as well: last, or beside its own.
        output, bias, *seen = found
        if isinstance(output, tuple):
            output, *seen = output
        if not self.adapter.is_on:
            return output, bias
        return output + self._delta(seen[0] if seen else input_), bias

    def _delta(self, seen: Tensor) -> Tensor:
        """The adapters' part of the output, complete in the same sense as the linear's own output is.

        Weight cut by rows (column parallel): A's output is whole, and the ranks' B give it gradients that are summed.
        Cut by columns (row parallel): A's output is a part of a sum; B then does the same on every rank. Under sequence
        parallel a rank does the factor that is not cut for its own tokens only, and its gradient is a part of a sum
        too: see `_adapt`.
        """
        how = self.adapter
        inner = F.linear(seen, self.lora_a) * how.scale
        if how.cut == "rows":
            share = (
                gather_from_sequence_parallel_region
                if how.is_sequence_parallel
                else copy_to_tensor_model_parallel_region
            )
            inner = share(inner, group=how.group)
        elif how.cut == "columns":
            add = (
                reduce_scatter_to_sequence_parallel_region
                if how.is_sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
            inner = add(inner, group=how.group)
        return F.linear(inner, self.lora_b)

    def merged_weight(self) -> Tensor:
        """This rank's part of W + scale * B @ A, in W's dtype; summed in float32. Needs no other rank."""
        weight = cast(Tensor, self.weight).detach()
        delta = self.lora_b.detach().float() @ self.lora_a.detach().float()
        return (weight.float() + self.adapter.scale * delta).to(weight.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's description for distributed checkpoints, adapters included: they load at another layout."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        metadata = metadata or {}
        axes: dict[Cut, dict[str, int]] = {"rows": {"lora_b": 0}, "columns": {"lora_a": 1}, "whole": {}}
        adapters = make_sharded_tensors_for_checkpoint(
            {"lora_a": self.lora_a, "lora_b": self.lora_b},
            prefix,
            axes[self.adapter.cut],
            sharded_offsets,
            tp_group=self.adapter.group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self.adapter.is_gated:
            key, single = f"{prefix}lora_b", metadata.get("singleton_local_shards", False)
            adapters[key] = apply_swiglu_sharded_factory(adapters[key], sharded_offsets, single)
        return {**state, **adapters}


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
            _adapt(linear, name, settings, groups.tp, seed)
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
    adapted = {f"{name}.weight": linear for chunk in chunks for name, linear in _adapted(chunk)}

    def value(name: str, tensor: Tensor) -> Tensor:
        return adapted[name].merged_weight() if name in adapted else tensor

    return value


def initial_a(rank: int, width: int, seed: int, name: str) -> Tensor:
    """A whole A, [rank, width] float32: uniform within 1 / sqrt(width), which is PEFT's Kaiming with a = sqrt(5)."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    random = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.empty(rank, width).uniform_(-(width**-0.5), width**-0.5, generator=random)


def _adapt(linear: Any, name: str, settings: LoraSettings, group: dist.ProcessGroup, seed: int) -> None:
    """Turn one linear into an adapted one. Parameters carry the marks that Megatron asks for.

    tensor_model_parallel: a part of a tensor; others are the same on every rank, and count once in the gradient's norm.
    sequence_parallel: gradients are of this rank's tokens, and Megatron sums them over the tensor-parallel ranks.
    """
    weight, cut, size = linear.weight, _cut(linear), dist.get_world_size(group)
    (rows, columns), is_sequence_parallel = weight.shape, bool(linear.config.sequence_parallel) and size > 1
    width = columns * size if cut == "columns" else columns
    whole = initial_a(settings.rank, width, seed, name)
    part = whole.chunk(size, dim=1)[dist.get_rank(group)] if cut == "columns" else whole
    factors = {"lora_a": part.to(weight, copy=True), "lora_b": weight.new_zeros(rows, settings.rank)}
    kind: type[Module] = type(linear)
    linear.__class__ = _adapted_class(kind)  # type: ignore[arg-type]
    for factor, tensor in factors.items():
        parameter, dim = Parameter(tensor.contiguous()), 1 if factor == "lora_a" else 0
        is_cut = cut == ("columns" if factor == "lora_a" else "rows")
        set_tensor_model_parallel_attributes(parameter, is_cut, dim if is_cut else -1, 1)
        for mark, holds in (("allreduce", True), ("sequence_parallel", is_sequence_parallel and not is_cut)):
            setattr(parameter, mark, holds)
        linear.register_parameter(factor, parameter)
    is_gated = bool(linear.config.gated_linear_unit) and name.endswith("linear_fc1")
    linear.adapter = Adapter(settings.scale, cut, group, is_sequence_parallel, is_gated)
    if hasattr(linear, "layer_norm_weight"):
        linear.return_layernorm_output = True


@cache
def _adapted_class(kind: type[Module]) -> type[Module]:
    """A class of the linear's own kind, with LowRank before Megatron's part of it.

    What megarl itself puts behind a linear's output, such as a norm, then comes behind the adapters' output too.
    """
    core = next(base for base in kind.__mro__ if base.__module__.startswith("megatron.core."))
    adapted: type[Module] = type(f"LowRank{core.__name__}", (LowRank, core), {})
    return adapted if core is kind else type(f"LowRank{kind.__name__}", (kind, adapted), {})


def _cut(linear: Any) -> Cut:
    """How a linear's weight is cut. Transformer Engine's say it by their mode, and have none where each rank holds all."""
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
    """A chunk's modules by global name: layers are counted over the whole model."""
    numbers = {
        name: layer.layer_number - 1
        for name, layer in chunk.named_modules()
        if re.fullmatch(r"decoder\.layers\.\d+", name)
    }
    for name, module in chunk.named_modules():
        match = re.match(r"(decoder\.layers)\.\d+", name)
        yield (f"{match[1]}.{numbers[match[0]]}{name[match.end() :]}" if match else name), module


def _linears(chunk: Module, targets: Sequence[str]) -> Iterator[tuple[str, Module]]:
    for name, module in _named(chunk):
        if name.rpartition(".")[2] in targets and not _is_routed(name):
            yield name, module


def _adapted(chunk: Module) -> Iterator[tuple[str, LowRank]]:
    for name, module in _named(chunk):
        if isinstance(module, LowRank):
            yield name, module


def _is_routed(name: str) -> bool:
    return ".mlp.experts." in name


def _check_targets(chunks: Sequence[Module], settings: LoraSettings, pp: dist.ProcessGroup) -> None:
    names = {name for chunk in chunks for name, _ in _named(chunk) if name.rpartition(".")[2] in TARGETS}
    mine = {(name.rpartition(".")[2], _is_routed(name)) for name in names}
    stages: list[set[tuple[str, bool]]] = [mine] * dist.get_world_size(pp)
    if len(stages) > 1:
        dist.all_gather_object(stages, mine, group=pp)
    found = set[tuple[str, bool]]().union(*stages)
    possible = [target for target in TARGETS if (target, False) in found]
    missing = [target for target in settings.targets if target not in possible]
    if missing:
        routed = [target for target in missing if (target, True) in found]
        what = (
            f"The model has {', '.join(routed)} only in its routed experts, which cannot have LoRA adapters"
            if routed
            else f"The model has no {', '.join(missing)}"
        )
        raise UserError(f"{what}: choose LoRA's targets among {', '.join(possible)}.")
    empty = [
        index for index, stage in enumerate(stages) if not {(target, False) for target in settings.targets} & stage
    ]
    if empty:
        raise UserError(
            f"Pipeline stage {empty[0]} has none of LoRA's targets {', '.join(settings.targets)}, and so nothing to train: "
            f"add one that every layer has, such as linear_proj."
        )
