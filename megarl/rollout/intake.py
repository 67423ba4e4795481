"""Which group is asked for next: the place in the data, groups that are asked for again, and the numbers of their samples."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any, Self

from megarl.data.cursor import Cursor
from megarl.data.mix import MixedCursor
from megarl.recipe.schema import Recipe
from megarl.rollout.ledger import Key, keys_from
from megarl.rollout.tasks import DataFacts


class Intake:
    """Hands out groups by their keys. size: samples of a group."""

    def __init__(self, cursor: Cursor, size: int) -> None:
        self._cursor, self._size = cursor, size
        self._again: deque[Key] = deque()  # asked for before, and not trained on
        self._asked: Counter[tuple[int, int]] = Counter()  # samples asked for of (step, row)

    @classmethod
    def of(cls, recipe: Recipe, data: DataFacts) -> Self:
        """From the first row on."""
        shuffle, seed = recipe.data.shuffle, recipe.run.seed
        if data.sets:
            mix = recipe.data.mix
            cursor: Cursor = MixedCursor(data.sets, mix, seed, shuffle=shuffle, what="prompts", digests=data.digests)
        else:
            cursor = Cursor(data.rows, seed, shuffle=shuffle, what="prompts", digests=data.digests)
        return cls(cursor, recipe.rollout.samples_per_prompt)

    def next(self, step: int) -> Key:
        """The next row of the data. step: that its group is meant for."""
        row = int(self._cursor.take(1)[0])
        first = self._asked[step, row]  # a prompt that comes twice, where the data starts over, has further seeds
        self._asked[step, row] += self._size
        return row, step, first

    def again(self) -> Key | None:
        """The next that was asked for before the run was stopped and was under way then; None where none is left."""
        if not self._again:
            return None
        row, step, first = self._again.popleft()
        self._asked[step, row] = max(self._asked[step, row], first + self._size)
        return row, step, first

    def repeat(self, key: Key) -> Key:
        """One that is known to have been the next from here."""
        found = self.next(key[1])
        assert found == key, f"{key} was asked for, and the next is {found}"
        return found

    def forget(self, before: int) -> None:
        """Nothing more is asked for for steps before this one."""
        self._asked = Counter({each: count for each, count in self._asked.items() if each[0] >= before})

    def place(self) -> float:
        """Epochs of the data that were handed out."""
        return self._cursor.epoch

    def state(self, waiting: Iterable[Key]) -> dict[str, Any]:
        """For a checkpoint: the place, and groups that were asked for and not trained on. waiting: those under way.

        Also how many samples of a row were asked for in a step: without it a row that comes again would have its first seeds.
        """
        return {
            **self._cursor.state(),
            "waiting": [*waiting, *self._again],
            "asked": [(step, row, count) for (step, row), count in self._asked.items()],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved place. Raises UserError where the data is not what it was."""
        self._cursor.load_state(state)
        self._again = deque(keys_from(state.get("waiting", ())))
        self._asked = Counter({(int(step), int(row)): int(count) for step, row, count in state.get("asked", ())})
