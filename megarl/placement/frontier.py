"""Choices that no other choice beats: Pareto filters, and joins of choices that keep them small. Exact: a filter only
ever removes what something kept is at least as good as.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.placement.lengths import Floats
from megarl.placement.space import Ints, Mask

# A step takes `max(beside, add + prepare + train)`. add: what comes one after the other. prepare, train: the two stages in
# which pools work side by side. beside: all that a pool does which does not wait for the others, but at most they for it: an
# asynchronous rollout's, and the pool's of a critic that learns while the next samples are generated.
# prepare_load, train_load: seconds that all cores of shared ones would need for a stage's work: those of pools add up, and a
# stage lasts at least so long. These two columns are left out where devices are devices.
COSTS = ("add", "prepare", "train", "beside", "prepare_load", "train_load")
# The columns of which pools side by side wait for the slowest; the others add up.
SLOWEST = slice(1, 4)
# After so many rounds a filter keeps what is left unseen: the answer stays exact, and the time bounded.
MOST_ROUNDS = 400
# Up to so many rows all pairs are compared at once.
SMALL = 300


@dataclass(frozen=True)
class Choices:
    """[N] choices of what shares a pool. devices: of the pool. rest: bytes while it waits. extra: bytes more while active.

    cost: [N, 6] or [N, 4] seconds of one step, as COSTS names them. rows: [N, R] which choice of each role.
    """

    devices: Ints
    rest: Floats
    extra: Floats
    cost: Floats
    rows: Ints

    def __len__(self) -> int:
        return len(self.devices)

    def take(self, kept: Ints | Mask) -> Choices:
        """Some of the choices."""
        return Choices(self.devices[kept], self.rest[kept], self.extra[kept], self.cost[kept], self.rows[kept])


def undominated(cost: Floats, groups: Ints | None = None) -> Ints:
    """Rows of [N, K] costs that no row of the same group matches or beats everywhere (of equals one stays), in order."""
    alive = np.arange(len(cost))
    if not len(cost):
        return alive
    groups = np.zeros(len(cost), np.int64) if groups is None else groups
    spread = np.ptp(cost, axis=0)
    cost, spread = cost[:, spread > 0], spread[spread > 0]
    score = ((cost - cost.min(axis=0)) / spread).sum(axis=1)
    alive = alive[np.lexsort((score, groups))]
    cost, groups = cost[alive], groups[alive]
    if len(cost) <= SMALL:
        beats = np.all(cost[:, None] <= cost[None], axis=2) & (groups[:, None] == groups[None])
        # Of equals the first stays; a row cannot be beaten by one with a larger sum.
        return np.sort(alive[~np.any(np.triu(beats, 1), axis=0)])
    kept: list[Any] = []
    for _ in range(MOST_ROUNDS):
        # The best score of each group is beaten by nobody: it leads this round.
        leads = np.flatnonzero(np.diff(groups, prepend=groups[0] - 1))
        kept.append(alive[leads])
        lead = np.repeat(leads, np.diff(np.append(leads, len(groups))))
        beaten = np.all(cost >= cost[lead], axis=1)
        alive, cost, groups = alive[~beaten], cost[~beaten], groups[~beaten]
        if not len(alive):
            break
    return np.sort(np.concatenate([*kept, alive]))


def is_least(values: Floats, groups: Ints) -> Mask:
    """[N] whether a value is the smallest of its group. groups: small whole numbers."""
    least = np.full(groups.max(initial=0) + 1, np.inf)
    np.minimum.at(least, groups, values)
    smallest: Mask = values == least[groups]
    return smallest


def join(left: Choices, right: Choices, usable: float, tied: int = 0) -> Choices:
    """Both in the same pool, on the same devices: memory and seconds add up, the larger extra is needed.

    tied: where it is above 0, `right` is one role whose choices belong to those of the first role of `left`: choice j to
    choice j modulo `tied`.
    """
    if tied:
        first, second = _pairs(left.rows[:, 0], right.rows[:, 0] % tied)
    else:
        first, second = _pairs(left.devices, right.devices)
    rest = left.rest[first] + right.rest[second]
    extra = np.maximum(left.extra[first], right.extra[second])
    fits = rest + extra <= usable
    first, second = first[fits], second[fits]
    return Choices(
        devices=left.devices[first],
        rest=rest[fits],
        extra=extra[fits],
        cost=left.cost[first] + right.cost[second],
        rows=np.concatenate([left.rows[first], right.rows[second]], axis=1),
    )


def _pairs(left: Ints, right: Ints) -> tuple[Ints, Ints]:
    """Indices of every pair of equal values; both are sorted by value first."""
    order_left, order_right = np.argsort(left, kind="stable"), np.argsort(right, kind="stable")
    start = np.searchsorted(right[order_right], left[order_left], "left")
    count = np.searchsorted(right[order_right], left[order_left], "right") - start
    first = np.repeat(order_left, count)
    offset = np.arange(len(first)) - np.repeat(np.cumsum(count) - count, count)
    return first, order_right[np.repeat(start, count) + offset]


@dataclass(frozen=True)
class Pools:
    """[N] choices of one pool, or of several together. devices: in all. cost: as in Choices; stages run side by side.

    picks: [N, P] which choice of each pool.
    """

    devices: Ints
    cost: Floats
    picks: Ints

    def __len__(self) -> int:
        return len(self.devices)

    def take(self, kept: Ints | Mask) -> Pools:
        """Some of the choices."""
        return Pools(self.devices[kept], self.cost[kept], self.picks[kept])

    def best(self) -> Pools:
        """Those that no choice of at most as many devices beats, by number of devices."""
        kept = undominated(np.column_stack([self.devices.astype(np.float64), self.cost]))
        return self.take(kept[np.argsort(self.devices[kept], kind="stable")])


def as_pool(choices: Choices, usable: float, most: int) -> Pools:
    """Choices of a whole pool that its devices hold."""
    fits = np.flatnonzero((choices.rest + choices.extra <= usable) & (choices.devices <= most))
    # First among choices of as many devices: that takes away nearly all of them, all sizes at once.
    fits = fits[undominated(choices.cost[fits], choices.devices[fits])]
    return Pools(choices.devices[fits], choices.cost[fits], fits[:, None]).best()


def beside(left: Pools, right: Pools, most: int) -> Pools:
    """Both at the same time on devices of their own, `most` in all. Stages wait for the slower one; the rest adds up."""
    room = np.searchsorted(right.devices, most - left.devices, "right")  # right is sorted by devices
    first = np.repeat(np.arange(len(left)), room)
    second = np.arange(len(first)) - np.repeat(np.cumsum(room) - room, room)
    one, other = left.cost[first], right.cost[second]
    cost = one + other
    cost[:, SLOWEST] = np.maximum(one[:, SLOWEST], other[:, SLOWEST])
    picks = np.concatenate([left.picks[first], right.picks[second]], axis=1)
    return Pools(left.devices[first] + right.devices[second], cost, picks)
