"""Which roles share devices: every way to put roles into pools, and the names that some of them have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from megarl.placement.workload import ACTOR, CRITIC, REFERENCE, REWARD, ROLLOUT, TEACHER

Pool = tuple[str, ...]
Partition = tuple[Pool, ...]
Name = Literal["colocate", "hybrid", "split", "standalone", "mixed"]
NAMES: tuple[Name, ...] = ("colocate", "hybrid", "split", "standalone")
_SPLIT = ((ACTOR, REFERENCE, TEACHER), (CRITIC, REWARD), (ROLLOUT,))


def partitions(roles: Sequence[str]) -> Iterator[Partition]:
    """Every set partition of the roles, each once; pools keep the roles' order."""
    if not roles:
        yield ()
        return
    *rest, last = roles
    for smaller in partitions(rest):
        for index, pool in enumerate(smaller):
            yield (*smaller[:index], (*pool, last), *smaller[index + 1 :])
        yield (*smaller, (last,))


def learns_late(pool: Pool) -> bool:
    """Whether a pool's critic learns while the next step's samples are generated, which need others' devices alone."""
    return CRITIC in pool and ACTOR not in pool and ROLLOUT not in pool


def in_one_pool(role: str, other: str, partition: Partition) -> bool:
    """Whether two roles share a pool."""
    return any(role in pool and other in pool for pool in partition)


def names_of(partition: Partition) -> tuple[Name, ...]:
    """The names that a partition goes by; with few roles, several. `mixed` where it has none.

    colocate: one pool. standalone: every role alone. split: actor with reference and teacher, critic
    with reward model, rollout apart. hybrid: actor and rollout share a pool, and others have their own.
    """
    roles = {role for pool in partition for role in pool}
    split = {tuple(role for role in pool if role in roles) for pool in _SPLIT} - {()}
    shared = any(ACTOR in pool and ROLLOUT in pool for pool in partition)
    found: dict[Name, bool] = {
        "colocate": len(partition) == 1,
        "standalone": all(len(pool) == 1 for pool in partition),
        "split": set(partition) == split,
        "hybrid": shared and len(partition) > 1,
    }
    return tuple(name for name, fits in found.items() if fits) or ("mixed",)
