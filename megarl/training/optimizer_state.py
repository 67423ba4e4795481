"""An optimizer's state in a form that every layout reads, around what Megatron does for one optimizer at a time.

Megatron chains optimizers: experts have one of their own, which on a pipeline stage without experts has no parameters.
The tensors of the state have the same names at every layout; what the parameter groups say (step, rate) is saved once, for
all groups of all ranks, under what tells them apart. Import only after `models.bootstrap.prepare_megatron`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys

from megarl.core.errors import MegarlError, UserError
from megarl.training.manifest import Manifest

SHARDING = "fully_reshardable"
METADATA = {
    "distrib_optim_sharding_type": SHARDING,
    "chained_optim_avoid_prefix": True,
    # Gathered in host memory, and on the first data-parallel rank alone, which is the one that writes it. Megatron otherwise
    # puts a kind of state whole on every device, and all of it, 12 bytes a parameter, into the memory of every rank.
    "distrib_optim_fully_reshardable_mem_efficient": True,
}
Group = dict[str, Any]
T = TypeVar("T")


class OptimizerState:
    """The state of one role's optimizer; of none, where that is None."""

    def __init__(self, optimizer: Any | None) -> None:
        self._optimizer = optimizer
        self._members: list[Any] = [] if optimizer is None else list(optimizer.chained_optimizers)
        self._is_distributed = all(isinstance(member, DistributedOptimizer) for member in self._members)
        if self._is_distributed:
            # One without parameters has no state, and with torch's Adam Megatron fails to say so.
            self._members = [member for member in self._members if member.buffers]

    def to_save(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Entries of a state to save; collective. weights: the model's own."""
        if self._optimizer is None:
            return {}
        for member in self._members:
            if not isinstance(member.optimizer, torch.optim.Adam | torch.optim.AdamW):  # models/megatron_torch_adam.py
                member.init_state_fn(
                    member.optimizer, member.config
                )  # what the first step would make, before the first
        if not self._is_distributed:
            return {"optimizer": self._whole(weights, is_loading=False)}
        states = self._states(weights, is_loading=False)
        return {
            "optimizer": {"groups": _united([group for state in states for group in _groups(state)])},
            "optimizer_state": _tensors(states),
        }

    def to_load(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Entries of a state to fill; collective."""
        if self._optimizer is None:
            return {}
        if not self._is_distributed:
            return {"optimizer": self._whole(weights, is_loading=True)}
        return {"optimizer_state": _tensors(self._states(weights, is_loading=True))}

    def load(self, found: Mapping[str, Any]) -> None:
        """Take over what `to_load` was filled with."""
        if self._optimizer is None:
            return
        if not self._is_distributed:
            self._optimizer.load_state_dict(found["optimizer"])
            return
        saved = found["optimizer"]["groups"]
        for index, member in enumerate(self._members):
            groups = [_matching(own, saved) for own in _groups(member.state_dict())]
            member.load_state_dict(
                {
                    "optimizer": {"param_groups": groups},
                    "param_state": found["optimizer_state"][str(index)],
                    "param_state_sharding_type": SHARDING,
                }
            )

    def check_readable(self, manifest: Manifest, folder: Path) -> None:
        """Raise UserError where a checkpoint does not have what this optimizer needs."""
        if self._optimizer is None:
            return
        if manifest.optimizer is None:
            raise UserError(
                f"{folder} holds weights only, and training goes on from an optimizer's state. "
                "Export it (`megarl convert mcore-to-hf`) and start a new run from the HF folder (model.path)."
            )
        saved, wanted = manifest.optimizer["name"], self._optimizer.config.optimizer
        if saved != wanted:
            raise UserError(
                f"{folder} holds the state of {saved}; the recipe's actor.optimizer.name is {wanted}. "
                f"Go on with {saved}, or start a new run from the exported weights."
            )

    def _states(self, weights: Mapping[str, Any], *, is_loading: bool) -> list[dict[str, Any]]:
        return [
            member.sharded_state_dict(weights, is_loading=is_loading, metadata=METADATA) for member in self._members
        ]

    def _whole(self, weights: Mapping[str, Any], *, is_loading: bool) -> Any:
        assert self._optimizer is not None
        return self._optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=METADATA)


def _groups(state: Mapping[str, Any]) -> list[Group]:
    groups: list[Group] = state["optimizer"]["param_groups"]
    return groups


def _tensors(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By the optimizers' order; without those whose state another rank saves."""
    kept = {str(index): state["param_state"] for index, state in enumerate(states)}
    return {name: tensors for name, tensors in kept.items() if tensors is not None}


def _kind(group: Group) -> tuple[Any, ...]:
    """What tells parameter groups apart."""
    return tuple(group[key] for key in param_group_identifier_keys)


def _united(mine: list[Group]) -> list[Group]:
    """Each kind of group once, over all ranks: a pipeline rank may lack some."""
    kinds = {_kind(group): group for groups in _gathered(mine) for group in groups}
    return [kinds[kind] for kind in sorted(kinds)]


def _gathered(mine: T) -> list[T]:
    """Everybody's, by rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def _matching(own: Group, saved: Sequence[Group]) -> Group:
    """The saved group of this kind."""
    for group in saved:
        if _kind(group) == _kind(own):
            return group
    raise MegarlError(f"The checkpoint has no parameter group like {own}; it has {list(saved)}.")
