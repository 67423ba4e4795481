"""An optimizer's state in a form that every layout reads, and that Megatron's own `fully_reshardable` checkpoints have.

Megatron chains optimizers: experts have one of their own, which on a pipeline stage without experts has no parameters.
The tensors of the state have the same names at every layout, and each data-parallel rank writes and reads a fair part of
them (see `state_shares`); what the parameter groups say (step, rate) is saved once, for all groups of all ranks, under what
tells them apart. Import only after `models.bootstrap.prepare_megatron`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from torch import Tensor

from megarl.core.errors import MegarlError, UserError
from megarl.models.all_gather import all_gather_objects
from megarl.models.hf_dtypes import ModelDtype
from megarl.training.manifest import Manifest
from megarl.training.state_shares import StateShares

METADATA = {"chained_optim_avoid_prefix": True}
PREFIX = "optimizer.state"  # of the tensors' names, as Megatron's
# Of a parameter group, what a checkpoint decides: all else is the recipe's, which may be another than it was saved with.
RESTORED = ("params", "step")
Group = dict[str, Any]


class OptimizerState:
    """The state of one role's optimizer; of none, where that is None."""

    def __init__(self, optimizer: Any | None) -> None:
        self._optimizer = optimizer
        # Addresses of what `to_save` put together on the host: nobody else has it.
        self.gathered: set[int] = set()
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
        groups = [group for member in self._members for group in _groups(member.state_dict())]
        states = {}
        for index, member in enumerate(self._members):
            shares = StateShares(member)
            whole = shares.gather()
            if not shares.alone:
                self.gathered |= {each.data_ptr() for kept in whole.values() for each in kept.values()}
            states[str(index)] = _described(shares, whole, weights)
        return {"optimizer": {"groups": _united(groups)}, "optimizer_state": states}

    def to_load(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Entries of a state to fill; collective."""
        if self._optimizer is None:
            return {}
        if not self._is_distributed:
            return {"optimizer": self._whole(weights, is_loading=True)}
        states = {}
        for index, member in enumerate(self._members):
            shares = StateShares(member)
            states[str(index)] = _described(shares, shares.empty(), weights)
        return {"optimizer_state": states}

    def check_weights(self, found: Mapping[str, Any], folder: Path) -> None:
        """Raise UserError where the optimizer's weights are not those that the model has from `folder` already; collective."""
        if self._optimizer is None or not self._is_distributed:
            return
        others = sum(all_gather_objects(sum(shares.differing(whole) for shares, whole in self._each(found))))
        if others:
            raise UserError(
                f"{folder}: the weights in its optimizer's state are not the model's, in {others} tensors. An earlier "
                "megarl wrote such states of tied embeddings under pipeline parallel. The model's weights are right: export them "
                "(`megarl convert mcore-to-hf`) and start a new run from the HF folder (model.path)."
            )

    def load(self, found: Mapping[str, Any]) -> None:
        """Take over what `to_load` was filled with; collective. Rates, betas and momentum stay the recipe's."""
        if self._optimizer is None:
            return
        own = [{key: group[key] for key in group if key not in RESTORED} for group in self._optimizer.param_groups]
        self._load(found)
        for group, settings in zip(self._optimizer.param_groups, own, strict=True):
            group.update(settings)

    def _load(self, found: Mapping[str, Any]) -> None:
        assert self._optimizer is not None
        if not self._is_distributed:
            self._optimizer.load_state_dict(found["optimizer"])
            return
        saved = found["optimizer"]["groups"]
        for member, (shares, whole) in zip(self._members, self._each(found), strict=True):
            groups = [_matching(own, saved) for own in _groups(member.state_dict())]
            member.load_state_dict({"optimizer": {"param_groups": groups}})  # makes the state where there is none yet
            shares.scatter(whole)

    def _each(self, found: Mapping[str, Any]) -> Iterator[tuple[StateShares, Mapping[int, Mapping[str, Tensor]]]]:
        """Of every optimizer with parameters, who takes what, and what this rank was given."""
        for index, member in enumerate(self._members):
            yield StateShares(member), found.get("optimizer_state", {}).get(str(index), {})

    def check_readable(self, manifest: Manifest, folder: Path) -> None:
        """Raise UserError where a checkpoint does not have what this optimizer needs."""
        if self._optimizer is None:
            return
        if manifest.optimizer is None:
            raise UserError(
                f"{folder} holds weights only, and training goes on from an optimizer's state. "
                "Export it (`megarl convert mcore-to-hf`) and start a new run from the HF folder (model.path)."
            )
        config = self._optimizer.config
        dtype: ModelDtype = "bfloat16" if config.bf16 else "float32"
        others = manifest.other_state(config.optimizer, config.sgd_momentum, dtype)
        if others:
            changed = ", ".join(f"{key} was {was!r} and is {now!r}" for key, (was, now) in others.items())
            raise UserError(
                f"{folder} holds an optimizer's state that the recipe's cannot go on from: {changed}. Go on with what it was, or "
                "start a new run from the exported weights."
            )

    def _whole(self, weights: Mapping[str, Any], *, is_loading: bool) -> Any:
        assert self._optimizer is not None
        return self._optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=METADATA)


def _groups(state: Mapping[str, Any]) -> list[Group]:
    groups: list[Group] = state["optimizer"]["param_groups"]
    return groups


def _described(
    shares: StateShares, whole: Mapping[int, Mapping[str, Tensor]], weights: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
    """The parameters of this rank as parts of the checkpoint's tensors, cut and named as the model's own.

    whole: of each, by number and by what is kept of it. The owner is the one that writes it, whichever data-parallel rank it is.
    """
    models, _ = extract_matching_values(
        dict(weights), lambda each: isinstance(each, ShardedTensor | ShardedTensorFactory)
    )
    like = {each.data: each for each in nested_values(models)}
    described: dict[int, dict[str, Any]] = {}
    for index, states in whole.items():
        model = like[shares.parameters[index]]
        pipeline, tensor, _ = model.replica_id
        described[index] = {}
        for key, state in states.items():
            of_it: dict[str, Any] = {"key": f"{PREFIX}.{key}.{model.key}", "replica_id": (pipeline, tensor, 0)}
            if isinstance(model, ShardedTensor):
                of_it["dtype"] = state.dtype
            described[index][key] = replace(model, data=state.reshape(model.data.shape), **of_it)
    return described


def _kind(group: Group) -> tuple[Any, ...]:
    """What tells parameter groups apart."""
    return tuple(group[key] for key in param_group_identifier_keys)


def _united(mine: list[Group]) -> list[Group]:
    """Each kind of group once, over all ranks: a pipeline rank may lack some."""
    kinds = {_kind(group): group for groups in all_gather_objects(mine) for group in groups}
    return [kinds[kind] for kind in sorted(kinds)]


def _matching(own: Group, saved: Sequence[Group]) -> Group:
    """The saved group of this kind."""
    for group in saved:
        if _kind(group) == _kind(own):
            return group
    raise MegarlError(f"The checkpoint has no parameter group like {own}; it has {list(saved)}.")
