"""What each rank of a pipeline holds, where its sizes need not divide the layers.

A rank is what memory and time are made of: its layers, those with experts among them, the embedding at one end and the head at
the other, and the micro-batches whose activations it keeps. The cut itself is `core.layout.stage_layers`, as the engine makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.core.layout import Layout, stage_layers
from megarl.models.config import ModelConfig
from megarl.placement.sizes import Sizes
from megarl.placement.space import Layouts

# Keys of choices are packed into one number: no size is larger than this.
_BASE = 1024


@dataclass(frozen=True)
class Stage:
    """[N] one kind of pipeline rank, under every choice.

    layers: of it, moe_layers: those of them with experts. embedding, head: 1 where it holds that end of the model, else 0.
    alive: micro-batches whose activations it keeps at most while it trains, each of all its layers. 1F1B: pp - i on rank i.
    Interleaved, 2 (pp - i - 1) + (vpp - 1) pp + 1 virtual stages of layers / vpp each (Narayanan et al., arXiv 2104.04473, as
    Megatron's `get_pp_rank_microbatches` has it). A step with fewer micro-batches keeps no more than these.
    """

    layers: Any
    moe_layers: Any
    embedding: Any
    head: Any
    alive: Any

    def parameters(self, sizes: Sizes) -> tuple[Any, Any]:
        """[N] dense and routed parameters, before tensor and expert parallel cut them."""
        # A tied matrix is on both ends of a pipeline, and once where one rank is both.
        ends = self.embedding + sizes.head * self.head * (1 - sizes.tied * self.embedding)
        dense = self.layers * sizes.attention + (self.layers - self.moe_layers) * sizes.dense_mlp
        return dense + self.moe_layers * sizes.shared + ends * sizes.embedding, self.moe_layers * sizes.routed


def stages(config: ModelConfig, choice: Layouts) -> tuple[Stage, ...]:
    """The kinds of ranks of every choice, first rank first, last rank last: what a maximum over them is one over all ranks.

    Left out are ranks that another one holds as much as, and more, of everything. Choices with fewer kinds repeat their last
    one. Raises UserError for layers that cannot be assigned as a choice says.
    """
    columns = (choice.pp, choice.vpp, choice.first_layers, choice.last_layers)
    key = np.zeros(len(choice), np.int64)
    for column in columns:
        assert np.all(column < _BASE), f"a pipeline of {int(np.max(column))}"
        key = key * _BASE + column
    _, found, row = np.unique(key, return_index=True, return_inverse=True)
    each = [_kinds(config, *(int(column[index]) for column in columns)) for index in found]
    most = max(map(len, each), default=1)
    table = np.array([kinds + kinds[-1:] * (most - len(kinds)) for kinds in each], np.float64).reshape(-1, most, 5)
    return tuple(Stage(*table[row, kind].T) for kind in range(most))


_Kind = tuple[float, float, float, float, float]


@lru_cache(maxsize=1024)
def _kinds(config: ModelConfig, pp: int, vpp: int, first: int, last: int) -> tuple[_Kind, ...]:
    """The fields of each Stage, of one layout. first, last: 0 where they are as all others."""
    layout = Layout(pp=pp, vpp=vpp, first_stage_layers=first or None, last_stage_layers=last or None, world_size=pp)
    ranks: list[_Kind] = []
    for rank, parts in enumerate(stage_layers(layout, config.num_layers)):
        layers = [layer for part in parts for layer in part]
        moe = sum(layer in config.moe_layers for layer in layers)
        ranks.append((len(layers), moe, float(rank == 0), float(rank == pp - 1), alive(rank, pp, vpp)))
    return tuple(kind for index, kind in enumerate(ranks) if not _covered(kind, ranks[:index], ranks[index + 1 :]))


def _covered(kind: _Kind, before: list[_Kind], after: list[_Kind]) -> bool:
    """Whether another rank holds as much of everything; of equals the first stays."""

    def most(one: _Kind) -> NDArray[np.float64]:
        layers, moe, *rest = one
        return np.array([layers - moe, moe, *rest])

    mine = most(kind)
    return any(np.all(mine <= most(other)) for other in before) or any(
        np.all(mine <= most(other)) and np.any(mine < most(other)) for other in after
    )


def alive(rank: int, pp: int, vpp: int) -> float:
    """Micro-batches whose activations a rank keeps at most while it trains; see Stage."""
    return float(pp - rank) if vpp == 1 else (2 * (pp - rank - 1) + (vpp - 1) * pp + 1) / vpp
