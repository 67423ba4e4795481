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
    """A copy of the role's whole weights under their HF names, on the host."""
    return {name: tensor.cpu().clone() for bucket in rank.buckets(role, 1 << 16) for name, tensor in bucket}


def written(rank: Rank, role: str) -> dict[str, torch.Tensor]:
    """The same as the only rank writes it into memory that others share."""
    found = {}
    with rank.engine(role).pieces(1 << 16) as pieces:
        assert len(pieces.buckets) > 1
        for number, bucket in enumerate(pieces.buckets):
            flat = torch.full((bucket[-1].start + bucket[-1].nbytes,), 255, dtype=torch.uint8)
            pieces.write(number, flat)
            found |= {entry.name: entry.of(flat) for entry in bucket}
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """In every bit, and in the dtypes."""
    assert found.keys() == expected.keys()
    assert {name: tensor.dtype for name, tensor in found.items()} == {name: t.dtype for name, t in expected.items()}
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []
