"""What a recipe's keys ask of each other: keys that nothing reads in this configuration, and values that contradict.

The rules are data, in `rules.py`. Batch arithmetic is in `batch.py`; files, models and functions are for
`megarl/preflight.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from megarl.core.platform import get_platform
from megarl.recipe.roles import Critic
from megarl.recipe.rules import CONTRADICTIONS, UNREAD_RULES, longest_sample
from megarl.recipe.schema import AnyRecipe, Recipe
from megarl.recipe.supervised import DpoRecipe, RmRecipe, SftRecipe

R = TypeVar("R", Recipe, SftRecipe, RmRecipe, DpoRecipe)


def unread_keys(recipe: AnyRecipe) -> list[str]:
    """Dotted paths of the keys that nothing reads in this configuration."""
    rules = [rule for rule in UNREAD_RULES if isinstance(recipe, rule.kinds) and not rule.read(recipe)]
    return [key for rule in rules for key in rule.keys]


def check_recipe(recipe: AnyRecipe, sources: Mapping[str, str]) -> list[str]:
    """What is wrong, one sentence each; empty when nothing is.

    sources: dotted path of every value that the user gave, to where. A default that nothing reads is no mistake.
    """
    problems = []
    for rule in UNREAD_RULES:
        if not isinstance(recipe, rule.kinds) or rule.read(recipe):
            continue
        for key in rule.keys:
            given = _given(key, sources)
            if given is not None:
                problems.append(
                    f"`{given}` ({sources[given]}) is read by nothing in this configuration: {rule.needs}, "
                    "or remove the key."
                )
    for contradiction in CONTRADICTIONS:
        if isinstance(recipe, contradiction.kinds) and contradiction.wrong(recipe):
            given = _given(contradiction.key, sources)
            where = "by default" if given is None else sources[given]
            problems.append(f"`{contradiction.key}` ({where}): {contradiction.says(recipe)}.")
    return problems


def _given(key: str, sources: Mapping[str, str]) -> str | None:
    """The first value that the user gave at a key, or, where it is a section, within it."""
    return next((source for source in sources if source == key or source.startswith(f"{key}.")), None)


def fill_defaults(recipe: R) -> R:
    """The recipe with the defaults that follow from other keys.

    GAE has a critic. Where SGLang cannot size its cache by itself, rollout.kv_tokens holds rollout.max_running_requests
    whole samples.
    """
    if not isinstance(recipe, Recipe):
        return recipe
    if recipe.algorithm.advantage == "gae" and recipe.critic is None:
        recipe = recipe.model_copy(update={"critic": Critic()})
    if recipe.rollout.kv_tokens is not None or not get_platform(recipe.cluster.platform).needs_kv_tokens:
        return recipe
    tokens = recipe.rollout.max_running_requests * longest_sample(recipe)
    return recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"kv_tokens": tokens})})
