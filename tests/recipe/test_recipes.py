"""The recipes that come with megarl: each loads, and its batch sizes add up."""

from __future__ import annotations

from pathlib import Path

import megarl
from megarl.recipe.batch import plan_batches
from megarl.recipe.load import detect_kind, load_recipe

RECIPES = Path(megarl.__file__).parent.parent / "recipes"


def test_every_recipe_loads_and_adds_up() -> None:
    for path in sorted(RECIPES.rglob("*.yaml")):
        recipe = load_recipe(path, [], detect_kind(path)).recipe
        assert plan_batches(recipe).optimizer_steps >= recipe.train.steps
