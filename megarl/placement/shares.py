"""Which of the placements that a search finds can share out a mini-batch: all roles are given the same shards of it.

A step is cut into as many shards as the least common multiple of all roles' data-parallel ranks, and each has a sample
at least (recipe/batch.py). Ranks of one pool divide one another, as do those of pools whose sizes are powers of two; 3 and 16
do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from megarl.placement.search import Found, Result
from megarl.placement.tables import AllTables
from megarl.placement.workload import ROLLOUT

# Numbers of shards that are tried, most first, where what was found cannot share out its samples.
TRIED = 4


def that_share_out(search: Callable[[AllTables], Result], tables: AllTables, most: int) -> Result:
    """What the search finds among placements of at most so many shards.

    Where the fastest of all has more, it looks again among roles whose ranks divide one number, for the largest such numbers.
    """
    result = search(tables)
    if all(num_shards(found, tables) <= most for found in result.found):
        return result
    best: dict[frozenset[tuple[str, ...]], Found] = {}
    for shards in _most_shards(tables, most):
        for found in search(_dividing(tables, shards)).found:
            key = frozenset(found.partition)
            if key not in best or found.seconds < best[key].seconds:
                best[key] = found
    return Result(tuple(sorted(best.values(), key=lambda found: found.seconds)), result.others)


def num_shards(found: Found, tables: AllTables) -> int:
    """The least common multiple of the roles' data-parallel ranks."""
    return math.lcm(
        *(
            int(tables.roles[role].layouts.dp[row])
            for pool, rows in zip(found.partition, found.rows, strict=True)
            for role, row in zip(pool, rows, strict=True)
            if role != ROLLOUT
        )
    )


def _most_shards(tables: AllTables, most: int) -> list[int]:
    """The largest numbers of shards that any two roles can have, none dividing another."""
    ranks = sorted({int(dp) for table in tables.roles.values() for dp in table.layouts.dp})
    kept: list[int] = []
    for shards in sorted({math.lcm(a, b) for a in ranks for b in ranks}, reverse=True):
        if shards <= most and not any(larger % shards == 0 for larger in kept):
            kept.append(shards)
    return kept[:TRIED]


def _dividing(tables: AllTables, shards: int) -> AllTables:
    """Every role's choices whose data-parallel ranks divide this number."""
    roles = {
        role: replace(table, choices=table.choices.take(shards % table.layouts.dp[table.choices.rows[:, 0]] == 0))
        for role, table in tables.roles.items()
    }
    return replace(tables, roles=roles)
