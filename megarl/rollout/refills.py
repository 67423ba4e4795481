"""Groups that are not kept, and how many others may be asked for in their place: dynamic sampling. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megarl.recipe.algorithm import KeepGroups
from megarl.rollout.batcher import is_kept
from megarl.rollout.facts import GroupFacts
from megarl.rollout.ledger import Entry, Key, keys_of


class Refills:
    """Counts them for one step after the other.

    most: of a step. keep: which groups are kept; None: those that teach. why: the reason that others are dropped for.
    replaced: since the last step was given, with their names.
    """

    def __init__(self, most: int, keep: KeepGroups | None = None) -> None:
        self._most, self._left, self._keep = most, 0, keep
        self.why = "zero_variance" if keep is None else "keep_groups"
        self.replaced: dict[Key, GroupFacts] = {}

    def begin(self) -> None:
        """A step is made, perhaps once more."""
        self._left = self._most

    def choose(self, finished: Iterable[Entry]) -> list[int]:
        """Which of these groups are replaced, as long as some are left."""
        if self._left <= 0:
            return []
        dull = [entry for entry in finished if entry.facts is not None and not is_kept(entry.facts, self._keep)]
        dull = dull[: self._left]
        self.again(keys_of(dull), [entry.facts for entry in dull if entry.facts is not None])
        return [entry.asked.group for entry in dull]

    def facts(self) -> list[GroupFacts]:
        """Of those that were replaced."""
        return list(self.replaced.values())

    def flawed(self) -> list[Key]:
        """Those of them that lack a response or a grade."""
        return [key for key, facts in self.replaced.items() if facts.flawed]

    def again(self, groups: Sequence[Key], facts: Sequence[GroupFacts]) -> None:
        """These are replaced."""
        self._left -= len(groups)
        self.replaced |= zip(groups, facts, strict=True)
