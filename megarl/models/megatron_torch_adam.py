"""Lets megatron-core's DistributedOptimizer be checkpointed over torch's Adam, which it supports only for fused Adams.

Two gaps of megatron-core 0.16.1, for which this file was written and checked: its state_dict asserts before the first
step because torch's Adam has no `step` yet; and after a load all parameters share one `step` tensor, which torch then
increments once for each.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from megarl.core.errors import MegarlError

WRITTEN_FOR = "0.16.1"
MARK = "_megarl_torch_adam"


def install() -> None:
    """Close the gaps on the class; repeatable. Raises MegarlError for another version of megatron-core."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if hasattr(DistributedOptimizer, MARK):
        return
    check_version("megatron_torch_adam.py")
    state_dict = DistributedOptimizer.state_dict
    load_state_dict = DistributedOptimizer.load_state_dict

    def complete_state_dict(self: Any) -> Any:
        _initialise(self.optimizer)
        return state_dict(self)

    def load_and_separate(self: Any, saved: Any) -> None:
        load_state_dict(self, saved)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    DistributedOptimizer.state_dict = complete_state_dict
    DistributedOptimizer.load_state_dict = load_and_separate
    setattr(DistributedOptimizer, MARK, True)


def check_version(file: str) -> None:
    """Raise MegarlError when megatron-core is not the version that the adapters were written for."""
    found = importlib.metadata.version("megatron-core")
    if found != WRITTEN_FOR:
        raise MegarlError(
            f"megarl's adapter megarl/models/{file} was written for megatron-core {WRITTEN_FOR} and found {found}. "
            "Install the pinned version (requirements/), or check the adapter against the new one."
        )


def _initialise(optimizer: Any) -> None:
    import torch

    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state.get(parameter):
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
