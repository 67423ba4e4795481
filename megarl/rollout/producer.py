"""How many groups may be asked for, and which a step takes: pure decisions from the ledger, so that any clock will do.

Step s trains on weights of version v. A group may be trained on while v - (version of its oldest token) <= max_staleness:
its last step is that far ahead. Two rules keep this bound without anything being thrown away:

- Admission. Before step s has its groups, at most `groups_per_step + ahead` wait (run or are finished); after that, until
  the weights are new, at most `ahead`. With `ahead` <= max_staleness x groups_per_step no more groups can have one last step
  than the steps until then take.
- Choice. Of the groups whose last step is d or earlier, all but (d - s) x groups_per_step have to be taken at step s, for
  each d; what is left of the step goes to whatever finished first. Taking the first to finish alone would let old ones pile
  up behind new ones.

ahead = 0 and max_staleness = 0 is the synchronous run: a step's groups are asked for when it begins, and all are waited for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.recipe.schema import Late, Recipe
from megarl.rollout.ledger import Ledger


@dataclass(frozen=True)
class Pace:
    """groups_per_step: that a step takes. ahead: groups in flight or finished beyond those of the step under way.

    refills: groups of a step that may be replaced because they teach nothing. late: what becomes of a group in its last
    step that has not finished.
    """

    groups_per_step: int
    max_staleness: int = 0
    ahead: int = 0
    refills: int = 0
    late: Late = "wait"

    @classmethod
    def of(cls, recipe: Recipe, *, beside: bool) -> Pace:
        """Of a recipe. beside: servers work while the ranks train, as they share no device with them."""
        rollout = recipe.rollout
        size, staleness = rollout.prompts_per_step, rollout.max_staleness
        ahead = staleness * size if beside else math.ceil((rollout.oversample - 1) * size)
        return cls(size, staleness, min(ahead, staleness * size), recipe.algorithm.refill_rounds * size, rollout.late)


def room(ledger: Ledger, pace: Pace, *, collecting: bool) -> int:
    """How many groups may be admitted now. collecting: the step under way has not taken its groups yet."""
    most = pace.ahead + (pace.groups_per_step if collecting else 0)
    return max(0, most - ledger.waiting())


@dataclass(frozen=True)
class Choice:
    """groups: that the step takes, in the order of their admission; empty while it has to wait. drop: late ones."""

    groups: tuple[int, ...] = ()
    drop: tuple[int, ...] = ()


def choose(ledger: Ledger, pace: Pace, version: int) -> Choice:
    """What a step that trains on weights of this version takes.

    It waits until it can take as many groups as it is due, or as there are. Deterministic given the order of finishing.
    """
    size = min(pace.groups_per_step, ledger.waiting())
    drops = pace.late == "drop" and pace.max_staleness > 0
    if ledger.num("finished") < size or not _can_take(ledger, pace, version, size, drops=drops):
        return Choice()
    finished = ledger.finished()
    chosen: dict[int, None] = {}
    if pace.late != "resume":
        late = _due(ledger.ages("running"), pace, version, 0) if drops else 0
        for distance in range(pace.max_staleness + 1):
            due = [entry.asked.group for entry in finished if _left(entry.oldest, pace, version) <= distance]
            num_running = _due(ledger.ages("running"), pace, version, distance) - late
            needed = min(size, len(due) + num_running - distance * pace.groups_per_step) - len(chosen)
            chosen |= dict.fromkeys([group for group in due if group not in chosen][: max(0, needed)])
    rest = [entry.asked.group for entry in finished if entry.asked.group not in chosen]
    chosen |= dict.fromkeys(rest[: size - len(chosen)])
    drop = [entry.asked.group for entry in ledger.running() if _left(entry.oldest, pace, version) <= 0] if drops else []
    return Choice(tuple(sorted(chosen)), tuple(drop))


def _can_take(ledger: Ledger, pace: Pace, version: int, size: int, *, drops: bool) -> bool:
    """Whether all groups that this step has to take have finished. By counts alone: asked each time that one finishes.

    drops: those that run in their last step are not waited for.
    """
    if pace.late == "resume":
        return True
    finished, running = ledger.ages("finished"), ledger.ages("running")
    late = _due(running, pace, version, 0) if drops else 0
    for distance in range(pace.max_staleness + 1):
        ready = _due(finished, pace, version, distance)
        ahead = distance * pace.groups_per_step
        if ready < min(size, ready + _due(running, pace, version, distance) - late - ahead):
            return False
    return True


def _due(ages: Mapping[int, int], pace: Pace, version: int, distance: int) -> int:
    """How many groups have their last step within `distance` steps after this one."""
    return sum(count for oldest, count in ages.items() if _left(oldest, pace, version) <= distance)


def _left(oldest: int, pace: Pace, version: int) -> int:
    """Steps after this one in which a group may still be trained on; below 0 it is too old."""
    return pace.max_staleness - (version - oldest)


def owner_of(loads: Sequence[int]) -> int:
    """Which collector the next group goes to: the one with the fewest under way, the first of equals."""
    return min(range(len(loads)), key=lambda index: (loads[index], index))
