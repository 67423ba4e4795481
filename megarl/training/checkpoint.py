"""Distributed checkpoints of one model with its optimizer and schedule, readable at another layout.

Megatron's dist_checkpointing (torch_dist) writes one part per rank into a folder. The caller gives it a temporary name
and commits it: nothing here makes a half-written folder look whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from megarl.core.errors import UserError


def save_checkpoint(folder: Path, model: torch.nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Write this rank's part; returns when the parts of all ranks are written. `folder` must exist and be empty."""
    dist_checkpointing.save(_state(model, optimizer, scheduler, is_loading=False), str(folder))


def load_checkpoint(folder: Path, model: torch.nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Read this rank's part into model, optimizer and schedule. Raises UserError where there is no checkpoint."""
    if not dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        raise UserError(
            f"{folder} holds no distributed checkpoint: name the folder that a run's checkpoint was saved to."
        )
    state = dist_checkpointing.load(_state(model, optimizer, scheduler, is_loading=True), str(folder))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])


def _state(model: Any, optimizer: Any, scheduler: Any, *, is_loading: bool) -> dict[str, Any]:
    # Optimizer state that can be read back at another layout. Made anew for each call: Megatron writes into it.
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    weights = model.sharded_state_dict(metadata=metadata)
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata),
        "scheduler": scheduler.state_dict(),
    }
