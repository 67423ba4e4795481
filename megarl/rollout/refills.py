"""Groups that are not kept, and how many others may be asked for in their place: dynamic sampling. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from megarl.recipe.algorithm import KeepGroups
from megarl.rollout.batcher import is_kept
from megarl.rollout.facts import GroupFacts
from megarl.rollout.ledger import Entry, Key, keys_of


class Refills:
    """Counts them for one step after the other.

    most: of a step. keep: which groups are kept; None: those that teach. why: the reason that others are dropped for.
    replaced: since the last step was given, with their names. undecided: numbers of groups that `choose` has put off.
    """

    def __init__(self, most: int, keep: KeepGroups | None = None) -> None:
        self._most, self._left, self._keep = most, 0, keep
        self.why = "zero_variance" if keep is None else "keep_groups"
        self.replaced: dict[Key, GroupFacts] = {}
        self.undecided: list[int] = []
        self._step: int | None = None
        self._numbers: list[int] = []  # of those that were replaced since the step began
        self._given: dict[Key, GroupFacts] = {}  # replaced for the step that was given last

    def begin(self, step: int) -> None:
        """A step is made, perhaps once more: then with what was replaced for it before, and no more than was left."""
        if step == self._step:
            self.replaced = self._given | self.replaced
        else:
            self._step, self._left, self._numbers = step, self._most, []
        self._given = {}

    def given(self) -> None:
        """The step has its groups: what is replaced from now on counts in the next one."""
        self._given, self.replaced = self.replaced, {}

    def choose(self, finished: Iterable[Entry], running: Collection[int] | None = None) -> list[int]:
        """Which of these groups are replaced, as long as some are left.

        running: numbers of groups that have not finished, where who finishes first is not to decide: replaced are then the
        first by their numbers, and where it is open whether a group is among these, it is put off.
        """
        self.undecided = []
        if self._left <= 0:
            return []
        dull = [entry for entry in finished if entry.facts is not None and not is_kept(entry.facts, self._keep)]
        dull = dull[: self._left] if running is None else self._first(dull, running)
        self.again(keys_of(dull), [entry.facts for entry in dull if entry.facts is not None])
        return [entry.asked.group for entry in dull]

    def _first(self, dull: Sequence[Entry], running: Collection[int]) -> list[Entry]:
        chosen: list[Entry] = []
        for at, entry in enumerate(sorted(dull, key=lambda each: each.asked.group)):
            number = entry.asked.group
            before = at + sum(other < number for other in self._numbers)
            if before + sum(other < number for other in running) < self._most:
                chosen.append(entry)
            elif before < self._most:
                self.undecided.append(number)
        return chosen

    def facts(self) -> list[GroupFacts]:
        """Of those that were replaced."""
        return list(self.replaced.values())

    def flawed(self) -> list[Key]:
        """Those of them that lack a response or a grade."""
        return [key for key, facts in self.replaced.items() if facts.flawed]

    def again(self, groups: Sequence[Key], facts: Sequence[GroupFacts]) -> None:
        """These are replaced."""
        self._left -= len(groups)
        self._numbers += [each.group for each in facts]
        self.replaced |= zip(groups, facts, strict=True)
