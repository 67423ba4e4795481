"""What the engine's tests share: one small setting, and how to look into a rank."""

from __future__ import annotations

from pathlib import Path

import torch

from megarl.core.layout import Layout
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.roles import Optimizer
from megarl.training.rank import Rank
from megarl.training.spec import PolicyObjective, RoleSpec
from tests.training import torch_loop

VOCAB = 97  # padded under tensor parallel
OPTIMIZER = Optimizer(
    # eps far above rounding: Adam would turn the rounding of tiny gradients into whole steps.
    lr=1e-3,
    eps=1e-6,
    weight_decay=0.1,
    clip_grad=0.05,
    schedule="linear",
    warmup_steps=1,
    min_lr=1e-4,
)
ALGORITHM = Algorithm(
    kl_coef=torch_loop.KL_COEF,
    entropy_coef=torch_loop.ENTROPY_COEF,
    clip_low=torch_loop.CLIP_LOW,
    clip_high=torch_loop.CLIP_HIGH,
)


def actor_spec(folder: Path, layout: Layout = Layout()) -> RoleSpec:  # noqa: B008
    """A policy that uses everything: KL, entropy bonus, temperature, weight decay, clipping, a schedule."""
    return RoleSpec(
        folder,
        "float32",
        torch_loop.TEMPERATURE,
        optimizer=OPTIMIZER,
        total_steps=4,
        objective=PolicyObjective(ALGORITHM),
        layout=layout,
    )


def weights(rank: Rank, role: str) -> dict[str, torch.Tensor]:
    """A copy of the role's whole weights under their HF names."""
    return {name: tensor.clone() for bucket in rank.buckets(role, 1 << 16) for name, tensor in bucket}
