"""Which part of the work belongs to which rank. Pure arithmetic: the driver asks it without torch or Megatron.

The order is Megatron's own (`tp-cp-ep-dp-pp`, tensor parallel fastest): neighbouring ranks share a tensor-parallel
group, so that its traffic stays inside a node.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.core.errors import UserError


@dataclass(frozen=True)
class Layout:
    """How the ranks of one pool share a model: `tp` ranks hold one copy, data parallel is what is left.

    Raises UserError when tp does not divide the number of ranks.
    """

    tp: int = 1
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.world_size < 1:
            raise UserError(f"A layout needs at least one rank; got tp={self.tp} over {self.world_size} ranks.")
        if self.world_size % self.tp:
            divisors = [size for size in range(1, self.world_size + 1) if self.world_size % size == 0]
            raise UserError(
                f"Tensor parallel size {self.tp} does not divide {self.world_size} devices. "
                f"Set actor.parallel.tp to one of {divisors}, or change cluster.devices."
            )

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks, which is the number of shards of a batch."""
        return self.world_size // self.tp


def tp_rank(rank: int, layout: Layout) -> int:
    """Index of the rank in its tensor-parallel group."""
    return rank % layout.tp


def dp_rank(rank: int, layout: Layout) -> int:
    """Index of the data-parallel shard that the rank works on."""
    return rank // layout.tp


def is_lead(rank: int, layout: Layout) -> bool:
    """Whether the rank answers for its data-parallel shard: the first of its tensor-parallel group does."""
    return tp_rank(rank, layout) == 0
