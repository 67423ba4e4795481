"""What a linear with LoRA adapters computes, exports and saves: the classes that lora.py makes of Megatron's linears.

Import after `models.bootstrap`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
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

from megarl.models.rule_table import Cut

# Names of the two factors. A linear of all of a rank's experts has so many, which end with the expert's number there.
LORA_A, LORA_B = "lora_a", "lora_b"


@dataclass
class Adapter:
    """How one linear is adapted on this rank. cut: of its weight, and so of A (by columns) or of B (by rows).

    group: of the ranks that share the weight. is_routed: a routed expert's.
    """

    scale: float
    cut: Cut
    group: dist.ProcessGroup
    is_sequence_parallel: bool
    is_gated: bool  # rows are those of a gate, then those of what it lets through
    is_routed: bool = False
    is_on: bool = True

    def delta(self, seen: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
        """The adapters' part of the output, complete in the same sense as the linear's own output is.

        Weight cut by rows (column parallel): A's output is whole, and the ranks' B give it gradients that are summed.
        Cut by columns (row parallel): A's output is a part of a sum; B then does the same on every rank. Under sequence
        parallel a rank does the factor that is not cut for its own tokens only, and its gradient is a part of a sum
        too: see `lora._new_factors`.
        """
        if self.is_routed:
            return self._delta_of_expert(seen, lora_a, lora_b)
        inner = F.linear(seen, lora_a) * self.scale
        if self.cut == "rows":
            share = (
                gather_from_sequence_parallel_region
                if self.is_sequence_parallel
                else copy_to_tensor_model_parallel_region
            )
            inner = share(inner, group=self.group)
        elif self.cut == "columns":
            add = (
                reduce_scatter_to_sequence_parallel_region
                if self.is_sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
            inner = add(inner, group=self.group)
        return F.linear(inner, lora_b)

    def _delta_of_expert(self, seen: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
        """Of a routed expert, whose tokens Megatron brings to all ranks that share it, and whose outputs it adds up.

        So activations and their gradients are parts of sums that are not this linear's to make. The factor that is not cut
        has a gradient for each rank's part of the weight, and needs the sum.
        """
        if self.cut == "rows":
            lora_a = copy_to_tensor_model_parallel_region(lora_a, group=self.group)
        else:
            lora_b = copy_to_tensor_model_parallel_region(lora_b, group=self.group)
        return F.linear(F.linear(seen, lora_a) * self.scale, lora_b)

    def merge(self, weight: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
        """This rank's part of W + scale * B @ A, in W's dtype; summed in float32. Needs no other rank."""
        delta = lora_b.detach().float() @ lora_a.detach().float()
        return (weight.detach().float() + self.scale * delta).to(weight.dtype)

    def sharded(
        self, factors: dict[str, Parameter], prefix: str, offsets: tuple[Any, ...], metadata: dict[str, Any]
    ) -> dict[str, Any]:
        """Megatron's description of both factors for distributed checkpoints: they load at another layout."""
        axes: dict[Cut, dict[str, int]] = {"rows": {LORA_B: 0}, "columns": {LORA_A: 1}, "whole": {}}
        described: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            factors, prefix, axes[self.cut], offsets, tp_group=self.group, dp_cp_group=metadata["dp_cp_group"]
        )
        if self.is_gated:
            key, single = f"{prefix}{LORA_B}", metadata.get("singleton_local_shards", False)
            described[key] = apply_swiglu_sharded_factory(described[key], offsets, single)
        return described


class LowRank(Module):
    """What an adapted linear gains; it stands in the linear's class, before Megatron's own (see `lora._adapted_class`)."""

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
        return output + self.adapter.delta(seen[0] if seen else input_, self.lora_a, self.lora_b), bias

    def factors(self, name: str) -> Iterator[tuple[str, Parameter, Parameter]]:
        """The global name of each weight, and its A and B: here of one. name: the linear's own, global."""
        yield f"{name}.weight", self.lora_a, self.lora_b

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's description for distributed checkpoints, adapters included."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        factors = {LORA_A: self.lora_a, LORA_B: self.lora_b}
        return {**state, **self.adapter.sharded(factors, prefix, sharded_offsets, metadata or {})}


class GroupedLowRank(Module):
    """What a linear of all experts of a rank gains, as Transformer Engine has them: adapters for each expert."""

    adapter: Adapter
    num_gemms: int  # experts on this rank
    _pg_collection: Any

    def forward(self, input_: Tensor, tokens_each: list[int]) -> tuple[Tensor, Any]:
        """As LowRank's. input_: [tokens, in], those of the experts one after the other; tokens_each: of each expert."""
        output, bias = super().forward(input_, tokens_each)
        if not self.adapter.is_on:
            return output, bias
        pieces = enumerate(input_.split(tokens_each))
        return output + torch.cat([self.adapter.delta(seen, *self._of(each)) for each, seen in pieces]), bias

    def factors(self, name: str) -> Iterator[tuple[str, Parameter, Parameter]]:
        """As LowRank's, of each expert's weight, by the expert's number in the whole model."""
        for each in range(self.num_gemms):
            yield f"{name}.weight{self._first + each}", *self._of(each)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """As LowRank's, under the names that experts have one by one."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        groups = self._pg_collection
        count, axis = dist.get_world_size(groups.ep) * self.num_gemms, len(sharded_offsets)
        for each in range(self.num_gemms):
            offsets = (*sharded_offsets, (axis, self._first + each, count))
            factors = dict(zip((LORA_A, LORA_B), self._of(each), strict=True))
            for name, entry in self.adapter.sharded(factors, prefix, offsets, metadata or {}).items():
                # As Megatron has it of the weights: the copies of an expert are counted among those who hold it.
                entry.replica_id = (*entry.replica_id[:2], dist.get_rank(groups.expt_dp))
                state[f"{name}{each}"] = entry
        return state

    @property
    def _first(self) -> int:
        """The number of this rank's first expert in the whole model."""
        return dist.get_rank(self._pg_collection.ep) * self.num_gemms

    def _of(self, each: int) -> tuple[Parameter, Parameter]:
        return getattr(self, f"{LORA_A}{each}"), getattr(self, f"{LORA_B}{each}")


Adapted = LowRank | GroupedLowRank  # a linear with adapters
