"""The search: the fastest placement among all partitions of the roles, sizes of pools and choices of each role.

Within a pool roles take turns and their seconds add up; pools work side by side, and every stage waits for the slowest (but
for a critic apart, whose updates the next rollout does not wait for). So of each pool only the undominated choices of
(devices, seconds by stage) can be part of a best placement, and of several pools together likewise: partitions are put
together pool by pool, and what cannot come under the best found so far is cut.
Exact over the tables that it is given; `docs/placement.md` says what these leave out.

After the mapping search of HybridFlow (arXiv 2409.19256, algorithm 1), which enumerates instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from megarl.placement.frontier import SLOWEST, Choices, Pools, as_pool, beside, is_least, join
from megarl.placement.lengths import Floats
from megarl.placement.partitions import Partition, Pool, learns_late, partitions
from megarl.placement.space import Ints
from megarl.placement.workload import ACTOR, CRITIC, REFERENCE, ROLLOUT

# Pairs that are put together at once; more are done block by block.
_BLOCK = 2_000_000
Allowed = Callable[[Partition], bool]


@dataclass(frozen=True)
class Tables:
    """The choices of every role.

    roles: by role, the rollout's with the weight sync to another pool. shared: the rollout's where it shares the
    actor's pool. flowing: the rollout's where it runs beside training instead of before it. tied: 0, or how many choices the
    actor had where the reference's are these again, once or several times over: it is at the layout that the actor is at.
    """

    roles: Mapping[str, Choices]
    shared: Choices
    flowing: Choices | None = None
    tied: int = 0


@dataclass(frozen=True)
class Found:
    """The best of one partition. devices, rows: of each pool, and which choice of each of its roles."""

    partition: Partition
    asynchronous: bool
    seconds: float
    devices: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Bound:
    """A partition that was left: no placement of it is faster than `seconds`; infinite where none fits."""

    partition: Partition
    seconds: float


@dataclass(frozen=True)
class Result:
    """found: the best of the `top` best partitions, fastest first. others: what is known of the rest."""

    found: tuple[Found, ...]
    others: tuple[Bound, ...]


def search(
    tables: Tables,
    *,
    devices: int,
    usable: float,
    top: int = 5,
    allowed: Allowed | None = None,
) -> Result:
    """The best placements of the `top` best partitions.

    devices: in all. usable: bytes of each. allowed: partitions that are asked for.
    """
    joined = _joined(tables, usable)
    wanted = [partition for partition in partitions(tuple(tables.roles)) if allowed is None or allowed(partition)]
    # The fastest choice alone of each pool makes placements that are good, though not the best: they limit the search.
    guess = {
        pool: [_pool_table(_fastest(each, usable), usable, devices) for each in ways] for pool, ways in joined.items()
    }
    guessed, unlikely = _look(wanted, guess, devices, top, np.inf)
    # What it does not fit for no choice fits for: the fastest is taken of those that fit.
    impossible = {bound.partition for bound in unlikely if bound.seconds == np.inf}
    limit = guessed[top - 1 :]
    below = float(np.nextafter(limit[0].seconds * (1 + 1e-9), np.inf)) if limit else np.inf
    least = _Least(tables, devices)
    pools = {
        pool: [_pool_table(each.take(least.bounds(each, pool) < below), usable, devices) for each in ways]
        for pool, ways in joined.items()
    }
    found, others = _look(wanted, pools, devices, top, below)
    others = [
        Bound(each.partition, np.inf if each.partition in impossible else min(each.seconds, below)) for each in others
    ]
    return Result(tuple(found), tuple(sorted(others, key=lambda bound: bound.seconds)))


def _look(
    wanted: list[Partition], pools: Mapping[Pool, list[_PoolTable]], devices: int, top: int, limit: float
) -> tuple[list[Found], list[Bound]]:
    """The best of the `top` best partitions below `limit`, and what is known of the others."""
    found: list[Found] = []
    others: list[Bound] = []
    # Few pools first: they are quick to look through, and what they find cuts the others short.
    for partition in sorted(wanted, key=len):
        below = min(limit, found[top - 1].seconds) if len(found) >= top else limit
        best, floor = _best_of(partition, pools, devices, below)
        if best is None:
            others.append(Bound(partition, floor))
            continue
        found = sorted([*found, best], key=lambda each: each.seconds)
        others += [Bound(each.partition, each.seconds) for each in found[top:]]
        found = found[:top]
    return found, others


def step_seconds(cost: Floats) -> Floats:
    """[N] seconds of a step from [N, 6] or [N, 4] costs."""
    stages = cost[:, 1:3]
    if cost.shape[1] > SLOWEST.stop:
        stages = np.maximum(stages, cost[:, SLOWEST.stop :])
    seconds: Floats = np.maximum(cost[:, 3], cost[:, 0] + stages[:, 0] + stages[:, 1])
    return seconds


def late(choices: Choices) -> Choices:
    """What a pool is whose critic learns while the next samples are generated: its updates are waited for a step later."""
    cost = choices.cost.copy()
    cost[:, 3] = cost[:, :3].sum(axis=1)
    cost[:, 2] = 0.0
    return replace(choices, cost=cost)


@dataclass(frozen=True)
class _PoolTable:
    """A pool's undominated choices by number of devices, the choices of roles behind them, and running least costs."""

    pools: Pools
    choices: Choices
    least: Floats  # the smallest of each column up to this row


def _joined(tables: Tables, usable: float) -> dict[Pool, list[Choices]]:
    """What every set of roles can be as one pool; the rollout alone in two ways, where it may be asynchronous."""
    joined: dict[Pool, Choices] = {}
    for role, alone in tables.roles.items():
        shared = tables.shared if role == ROLLOUT else alone
        for pool in list(joined):
            tied = tables.tied if role == REFERENCE and ACTOR in pool else 0
            joined[(*pool, role)] = join(joined[pool], shared if ACTOR in pool else alone, usable, tied)
        joined[(role,)] = alone
    result = {pool: [late(choices) if learns_late(pool) else choices] for pool, choices in joined.items()}
    if tables.flowing is not None:
        result[(ROLLOUT,)].append(tables.flowing)
    return result


def _fastest(choices: Choices, usable: float) -> Choices:
    """The fastest choice that fits, for each number of devices."""
    rows = np.flatnonzero(choices.rest + choices.extra <= usable)
    rows = rows[is_least(step_seconds(choices.cost[rows]), choices.devices[rows])]
    return choices.take(rows[np.unique(choices.devices[rows], return_index=True)[1]])


class _Least:
    """The least that each role costs on so many devices at most, and what that says of pools that lack it."""

    def __init__(self, tables: Tables, devices: int) -> None:
        self._devices = devices
        self._sizes: dict[str, Ints] = {}
        self._least: dict[str, Floats] = {}
        for role, alone in tables.roles.items():
            kinds = [alone]
            if role == ROLLOUT:
                kinds += [tables.shared, *filter(None, [tables.flowing])]
            elif role == CRITIC:
                kinds += [late(alone)]
            sizes = np.concatenate([kind.devices for kind in kinds])
            order = np.argsort(sizes, kind="stable")
            costs = np.concatenate([kind.cost for kind in kinds])[order]
            self._sizes[role] = sizes[order]
            # A first row of its own stands for too few devices.
            self._least[role] = np.concatenate(
                [np.full((1, costs.shape[1]), np.inf), np.minimum.accumulate(costs, axis=0)]
            )

    def _of(self, role: str, devices: Ints) -> Floats:
        return self._least[role][np.searchsorted(self._sizes[role], devices, "right")]

    def bounds(self, choices: Choices, pool: Pool) -> Floats:
        """[N] seconds that no placement with such a pool is below: each role that is not in it joins it or is beside it."""
        left = self._devices - choices.devices
        cost = choices.cost.copy()
        for role in self._least:
            if role in pool:
                continue
            joins, apart, own = self._of(role, choices.devices), self._of(role, left), choices.cost[:, SLOWEST]
            stages = np.minimum(own + joins[:, SLOWEST], np.maximum(own, apart[:, SLOWEST]))
            stages = np.maximum(cost[:, SLOWEST], stages)
            cost += np.minimum(joins, apart)
            cost[:, SLOWEST] = stages
        return step_seconds(cost)


def _pool_table(choices: Choices, usable: float, devices: int) -> _PoolTable:
    pools = as_pool(choices, usable, devices)
    least: Floats = np.minimum.accumulate(pools.cost, axis=0) if len(pools) else pools.cost
    return _PoolTable(pools, choices, least)


def _best_of(
    partition: Partition, pools: Mapping[Pool, list[_PoolTable]], devices: int, limit: float
) -> tuple[Found | None, float]:
    """The best of one partition if it is below `limit`, and seconds that none of its placements is below."""
    best: Found | None = None
    floor = np.inf
    # The pools with the fewest choices first: what is put together stays small for longer.
    order = tuple(sorted(partition, key=lambda pool: (ROLLOUT in pool, len(pools[pool][0].pools))))
    for combination in product(*(list(enumerate(pools[pool])) for pool in order)):
        tables = [table for _, table in combination]
        value, picks, least = _least_seconds(tables, devices, limit)
        floor = min(floor, least)
        if picks is None:
            continue
        limit = value
        at = [int(pick) for pick in picks]
        best = Found(
            partition=order,
            asynchronous=any(index > 0 for index, _ in combination),
            seconds=value,
            devices=tuple(int(table.choices.devices[pick]) for table, pick in zip(tables, at, strict=True)),
            rows=tuple(tuple(map(int, table.choices.rows[pick])) for table, pick in zip(tables, at, strict=True)),
        )
    return best, floor


def _least_seconds(tables: list[_PoolTable], devices: int, limit: float) -> tuple[float, Ints | None, float]:
    """Least seconds of pools side by side, which choice of each where that is below `limit`, and a floor under all."""
    if any(not len(table.pools) for table in tables):
        return np.inf, None, np.inf
    have = tables[0].pools
    floor = np.inf
    for index, table in enumerate(tables[1:-1], start=1):
        bounds = _bounds(have, tables[index:], devices)
        floor = min(floor, float(bounds[bounds >= limit].min(initial=np.inf)))
        have = beside(have.take(bounds < limit), table.pools, devices).best()
    if len(tables) > 1:
        bounds = _bounds(have, tables[-1:], devices)
        floor = min(floor, float(bounds[bounds >= limit].min(initial=np.inf)))
        have = have.take(bounds < limit)
    value, picks = np.inf, None
    for some in _last(have, tables, devices):
        seconds = step_seconds(some.cost)
        if len(seconds) and seconds.min() < value:
            value, picks = float(seconds.min()), some.picks[int(seconds.argmin())]
    return value, picks if value < limit else None, min(floor, value)


def _last(have: Pools, tables: list[_PoolTable], devices: int) -> Iterator[Pools]:
    """The whole placements, in blocks."""
    if len(tables) == 1:
        yield have
        return
    last = tables[-1].pools
    block = max(1, _BLOCK // len(last))
    for start in range(0, len(have), block):
        yield beside(have.take(np.arange(start, min(start + block, len(have)))), last, devices)


def _bounds(have: Pools, coming: list[_PoolTable], devices: int) -> Floats:
    """[N] seconds that no placement is below which goes on from these pools; infinite where none of them fits."""
    left = devices - have.devices
    cost = have.cost.copy()
    fits = np.ones(len(have), np.bool_)
    for table in coming:
        at = np.searchsorted(table.pools.devices, left, "right") - 1
        fits &= at >= 0
        least = table.least[np.maximum(at, 0)]
        stages = np.maximum(cost[:, SLOWEST], least[:, SLOWEST])
        cost += least
        cost[:, SLOWEST] = stages
    return np.where(fits, step_seconds(cost), np.inf)
