"""What a rule about a recipe's keys is. The rules themselves: `rules.py` and `*_rules.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megarl.recipe.functions import Asked
from megarl.recipe.schema import AnyRecipe, Recipe
from megarl.recipe.supervised import SupervisedRecipe

RL = (Recipe,)


@dataclass(frozen=True)
class Unread:
    """Keys that nothing reads unless `read(recipe, asked)`; `needs` says what would make them count.

    asked: what the algorithm's functions ask for; nothing in a supervised run.
    """

    keys: tuple[str, ...]
    read: Callable[[Any, Asked], bool]
    needs: str | Callable[[Any, Asked], str]
    kinds: tuple[type[AnyRecipe], ...] = (Recipe, SupervisedRecipe)


@dataclass(frozen=True)
class Contradiction:
    """A key whose value cannot go with the others when `wrong(recipe, asked)`; `says(recipe)` names values and way out."""

    key: str
    wrong: Callable[[Any, Asked], bool]
    says: Callable[[Any], str]
    kinds: tuple[type[AnyRecipe], ...] = (Recipe, SupervisedRecipe)
