"""How often a run went back to a checkpoint because of what a step would have taught it, and whether it may once more."""

from __future__ import annotations

from collections import Counter

from megarl.recipe.rules import may_rewind
from megarl.recipe.schema import Recipe
from megarl.rollout.decisions import Decision


class Rewinds:
    """Counts them. total: over all lives of the run."""

    def __init__(self, recipe: Recipe) -> None:
        self._most, self._told = recipe.train.max_rewinds, may_rewind(recipe)
        self.total = 0
        self._to: Counter[int] = Counter()  # by the step of the checkpoint

    def passed(self, decision: Decision) -> None:
        """What was gone back over is passed over."""
        self.total += decision.times
        self._to[decision.step] += decision.times

    def may(self, to_step: int) -> bool:
        """Whether the run may go back there: not for ever."""
        return self._to[to_step] < self._most

    def metrics(self) -> dict[str, float]:
        """For a step; nothing where the recipe never goes back."""
        return {"rollout/rewinds": float(self.total)} if self._told else {}
