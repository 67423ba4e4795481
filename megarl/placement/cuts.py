"""Which cuts of a model's layers into pipeline ranks are worth a look: even ones, and those that fill ranks of unlike ends best.

A pipeline goes at the pace of its slowest rank, and its fullest rank says whether it fits. The first rank has the embedding,
the last one the head, which may weigh as much as several layers; the layers themselves differ where only some have experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megarl.models.config import ModelConfig
from megarl.placement.sizes import model_sizes

Floats = NDArray[np.float64]
Cuts = NDArray[np.int64]


@lru_cache(maxsize=256)
def cuts(config: ModelConfig, pp: int, vpp: int, *, head: bool) -> tuple[tuple[int, int], ...]:
    """Layers of the first and of the last rank, for every cut that is worth a look; (0, 0) is the even one; none if none can be.

    The even one where it can be; of all others the one whose slowest rank multiplies least, and the one whose fullest rank has
    the fewest parameters, where these are better than an even one. head: whether the model ends in a vocabulary matrix.
    """
    if pp == 1:
        return ((0, 0),) if vpp == 1 else ()
    every = all_cuts(config.num_layers, pp, vpp)
    if not len(every):
        return ()
    even = config.num_layers // pp
    best = {(0, 0)} if bool(np.all(every[0] == even)) else set()
    for weights in (multiplied(config, head=head), kept(config, head=head)):
        each = loads(every, pp, vpp, weights)
        # Of those whose fullest rank is the same the most even one; of equals the first.
        fullest = each.max(axis=1)
        least = np.flatnonzero(fullest <= fullest.min() * (1 + 1e-12))
        first, middle, last = every[least[np.square(each[least]).sum(axis=1).argmin()]]
        best.add((0, 0) if first == middle == last else (int(first), int(last)))
    return tuple(sorted(best))


def all_cuts(num_layers: int, pp: int, vpp: int) -> Cuts:
    """[M, 3] layers of the first, of each middle and of the last rank: every cut that a layout can say, an even one first."""
    rows = []
    for middle in range(vpp, num_layers + 1, vpp):
        ends = num_layers - (pp - 2) * middle
        rows += [(first, middle, ends - first) for first in range(vpp, ends - vpp + 1, vpp) if ends % vpp == 0]
        if pp == 2 and rows:
            # There is no middle: it is as good as the last.
            rows = [(first, last, last) for first, _, last in rows]
            break
    table = np.array(rows, np.int64).reshape(-1, 3)
    return table[np.argsort(np.ptp(table, axis=1) > 0, kind="stable")] if len(table) else table


@dataclass(frozen=True)
class Weights:
    """What layers and ends add to a rank, in any unit. sums: of all layers before each; one more than there are layers."""

    sums: Floats
    embedding: float
    head: float


def multiplied(config: ModelConfig, *, head: bool) -> Weights:
    """Weights that one token multiplies with."""
    moe = config.moe
    return _weights(config, 0.0 if moe is None else moe.top_k / moe.num_experts, embedding=False, head=head)


def kept(config: ModelConfig, *, head: bool) -> Weights:
    """Parameters."""
    return _weights(config, 1.0, embedding=True, head=head)


def _weights(config: ModelConfig, experts: float, *, embedding: bool, head: bool) -> Weights:
    """experts: the share of them that counts."""
    sizes = model_sizes(config, head=head)
    has_experts = np.isin(np.arange(config.num_layers), list(config.moe_layers))
    layers = sizes.attention + np.where(has_experts, experts * sizes.routed + sizes.shared, sizes.dense_mlp)
    return Weights(np.append(0.0, np.cumsum(layers)), sizes.embedding * embedding, sizes.embedding * head)


def loads(each: Cuts, pp: int, vpp: int, weights: Weights) -> Floats:
    """[M, pp] what every rank has under these cuts."""
    columns = np.array([0, *[1] * (pp - 2), 2])
    chunks = np.tile(each[:, columns] // vpp, vpp)
    ends = np.cumsum(chunks, axis=1)
    parts = weights.sums[ends] - weights.sums[ends - chunks]
    total: Floats = parts.reshape(len(each), vpp, pp).sum(axis=1)
    total[:, 0] += weights.embedding
    total[:, -1] += weights.head
    return total
