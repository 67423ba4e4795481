"""What each of four processes does for test_state_shares: `<rank> <world size> <port> <folder>`.

The optimizer's state of several layouts, gathered as megarl does and as megatron-core alone does, saved, and loaded again.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch import Tensor

from megarl.core.layout import Layout
from megarl.training.checkpoint import _weights
from megarl.training.checkpoint_files import RankStrategy
from megarl.training.rank import Rank
from megarl.training.state_shares import ROUND, StateShares
from tests.support.platforms import chosen
from tests.training.harness import actor_spec
from tests.training.invariance_cases import MINIS
from tests.training.samples import shards

LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("dense", {}),
    ("dense", {"pp": 2, "vpp": 2}),
    ("tied", {"pp": 2}),
    ("moe", {"ep": 2}),
]
# What megatron-core gathers itself: on the first data-parallel rank, over gloo.
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "distrib_optim_fully_reshardable_mem_efficient": True,
}


def step(rank: Rank, number: int) -> dict[str, float]:
    """One update on a mini-batch."""
    groups = rank.engine("actor").groups
    parts, columns = shards([MINIS[number]], dp=groups.layout.dp, micro_batches=2)
    return rank.update("actor", parts[groups.place.dp], columns[groups.place.dp])


def state(members: list[Any]) -> list[Tensor]:
    """A copy of what this rank keeps."""
    return [
        tensor.detach().cpu().clone()
        for member in members
        for parameter in member.model_param_group_index_map
        for _, tensor in sorted(member._get_main_param_and_optimizer_states(parameter).items())
    ]


@dataclass(frozen=True)
class Share:
    """Elements that a rank takes whole, of how many that so many ranks share, and of the largest parameter."""

    own: int
    total: int
    ranks: int
    largest: int


def taken(member: Any, most: int) -> Share:
    """Of one optimizer, gathered and handed out again. most: elements of a round."""
    shares = StateShares(member, most)
    sizes = [parameter.numel() for parameter in shares.parameters]
    shares.scatter(shares.gather())
    return Share(sum(sizes[index] for index in shares.own), sum(sizes), member.data_parallel_group.size(), max(sizes))


def observe(rank: Rank, root: Path, name: str, model: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Save twice, the second time beside the next step; load, train on again."""
    spec = actor_spec(root / model, Layout(world_size=4, **sizes))
    rank.build("actor", spec)
    step(rank, 0)
    engine = rank.engine("actor")
    with engine._groups.active():
        members = [member for member in engine._stepper.optimizer.chained_optimizers if member.buffers]
        saved = state(members)
        weights = _weights(engine._chunks)
        states = [member.sharded_state_dict(weights, metadata=METADATA)["param_state"] for member in members]
        upstream = {str(index): each for index, each in enumerate(states) if each is not None}
        # It is written as megarl writes: Megatron's own strategy starts processes for that, and what it gathered is there.
        strategy, folder = RankStrategy(copy=False), str(root / f"{name}.upstream")
        dist_checkpointing.save({"optimizer_state": upstream}, folder, sharded_strategy=strategy)
        held = [taken(member, most) for most in (1000, ROUND) for member in members]
        kept = all(torch.equal(*pair) for pair in zip(saved, state(members), strict=True))
    rank.save("actor", root / name, wait=False)
    went_on = step(rank, 1)
    rank.finish_save("actor")
    rank.build("actor", spec)
    rank.load("actor", root / name)
    engine = rank.engine("actor")
    members = [member for member in engine._stepper.optimizer.chained_optimizers if member.buffers]
    loaded = all(torch.equal(*pair) for pair in zip(saved, state(members), strict=True))
    return {"shares": held, "kept": kept, "loaded": loaded, "same step": step(rank, 1) == went_on}


def main() -> None:
    """Go through the layouts."""
    index, size, port, root = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    rank = Rank(index, size, chosen().name, seed=1)
    rank.rendezvous("127.0.0.1", port, timeout_s=120)
    found = [observe(rank, root, str(number), *layout) for number, layout in enumerate(LAYOUTS)]
    rank.close()
    torch.save(found, root / f"rank{index}.pt")
