"""What a recipe's keys ask of each other: keys that nothing reads in this configuration, and values that contradict.

The rules are data, in `rules.py`. What they say of the algorithm's functions follows from these. Batch arithmetic is in
`batch.py`; files and models are for `megarl/run/preflight.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from megarl.core.errors import UserError
from megarl.core.platform import get_platform
from megarl.recipe.functions import Asked, Own, asked, check_algorithm
from megarl.recipe.layouts import role_layouts
from megarl.recipe.roles import Critic
from megarl.recipe.rollout_rules import longest_sample, longest_served
from megarl.recipe.rule import Unread
from megarl.recipe.rules import CONTRADICTIONS, UNREAD_RULES
from megarl.recipe.sampling_rules import correction_by_default
from megarl.recipe.schema import AnyRecipe, Recipe, RecipeT
from megarl.recipe.source import COMMAND_LINE

NOTHING = Asked(frozenset(), frozenset())


def unread_keys(recipe: AnyRecipe) -> list[str]:
    """Dotted paths of the keys that nothing reads in this configuration, each once."""
    return list(dict.fromkeys(key for rule in _unread(recipe, _asked(recipe, "may ask for all")) for key in rule.keys))


def check_recipe(
    recipe: AnyRecipe, sources: Mapping[str, str], *, look: bool = False, recorded: bool = False
) -> list[str]:
    """What is wrong, one sentence each; empty when nothing is.

    sources: dotted path of every value that the user gave, to where. A default that nothing reads is no mistake, and of a recipe
    that a run has written (recorded) only what the command line gives is one.
    look: at functions named by import path, too; else they may ask for everything, and may do without it. Raises UserError
    then, where a path leads nowhere.
    """
    may_ask, asks = (_asked(recipe, "look" if look else own) for own in ("may ask for all", "asks for nothing"))
    unread: dict[str, str] = {}
    problems: list[str] = []
    meant = {key: at for key, at in sources.items() if at == COMMAND_LINE} if recorded else sources
    for rule in _unread(recipe, may_ask):
        for given in (_given(key, meant) for key in rule.keys):
            if given is None or given in unread or _is_off(recipe, given):  # the first rule says why
                continue
            needs = rule.needs if isinstance(rule.needs, str) else rule.needs(recipe, may_ask)
            where = f"`{given}` ({sources[given]})"
            unread[given] = f"{where} is read by nothing in this configuration: {needs}, or remove the key."
    for contradiction in CONTRADICTIONS:
        if isinstance(recipe, contradiction.kinds) and contradiction.wrong(recipe, asks):
            at = _given(contradiction.key, sources)
            where = "by default" if at is None else sources[at]
            problems.append(f"`{contradiction.key}` ({where}): {contradiction.says(recipe)}.")
    return [*unread.values(), *problems]


def check_functions(recipe: Recipe, sources: Mapping[str, str], *, recorded: bool = False) -> None:
    """Whether the algorithm's functions exist and get what they ask for, and whether any asks for what the recipe gives.

    Imports those named by import path. Raises UserError.
    """
    taught = [] if recipe.teacher is None else ["teacher"]  # which may be on no rank
    check_algorithm(recipe.algorithm, {*role_layouts(recipe), *taught})
    problems = check_recipe(recipe, sources, look=True, recorded=recorded)
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        raise UserError("The recipe does not go with its functions." + "".join(f"\n  - {each}" for each in problems))


def _asked(recipe: AnyRecipe, own: Own) -> Asked:
    return asked(recipe.algorithm, own) if isinstance(recipe, Recipe) else NOTHING


def _unread(recipe: AnyRecipe, may_ask: Asked) -> Iterator[Unread]:
    return (rule for rule in UNREAD_RULES if isinstance(recipe, rule.kinds) and not rule.read(recipe, may_ask))


def _given(key: str, sources: Mapping[str, str]) -> str | None:
    """The first value that the user gave at a key, or, where it is a section, within it."""
    return next((source for source in sources if source == key or source.startswith(f"{key}.")), None)


def _is_off(recipe: AnyRecipe, key: str) -> bool:
    """Whether null, or false, 0 or nothing by default, stands there: who turns off what nothing reads asks for nothing."""
    section: Any = recipe
    default: Any = ...
    for name in key.split("."):
        if isinstance(section, dict):  # null has taken back what users have named
            return name not in section
        if not isinstance(section, BaseModel):
            return False
        default = type(section).model_fields[name].get_default(call_default_factory=True)
        section = getattr(section, name)
    return section is None or (not section and section == default)


def fill_defaults(recipe: RecipeT) -> RecipeT:
    """The recipe with the defaults that follow from other keys.

    What nothing reads is at its default, wherever a preset said otherwise: nobody downstream has to ask. An advantage
    that asks for values has a critic, and GAE's is whitened. Samples of older weights are weighed where nothing else is said
    (sampling_rules.correction_by_default). Where SGLang cannot size its cache by itself, rollout.kv_tokens holds
    rollout.max_running_requests whole samples. On a CPU a forward pass has fewer tokens where nothing is said: as many
    times Platform.micro_batch_tokens as a whole sample takes.
    """
    unread = unread_keys(recipe)
    for key in unread:
        recipe = _with_default(recipe, key.split("."))
    if not isinstance(recipe, Recipe):
        return recipe
    if recipe.critic is None and "values" in _asked(recipe, "asks for nothing").advantage:
        recipe = recipe.model_copy(update={"critic": Critic()})
    if recipe.algorithm.whiten is None and "algorithm.whiten" not in unread:
        recipe = recipe.model_copy(update={"algorithm": recipe.algorithm.model_copy(update={"whiten": True})})
    correction = correction_by_default(recipe)
    if "algorithm.correction" not in unread and correction != recipe.algorithm.correction:
        recipe = recipe.model_copy(update={"algorithm": recipe.algorithm.model_copy(update={"correction": correction})})
    recipe = _with_micro_batch(recipe)
    sized = recipe.rollout.kv_tokens is not None or recipe.rollout.external is not None
    if sized or not get_platform(recipe.cluster.platform).needs_kv_tokens:
        return recipe
    tokens = recipe.rollout.max_running_requests * longest_served(recipe)
    return recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"kv_tokens": tokens})})


def _with_micro_batch(recipe: Recipe) -> Recipe:
    fewer = get_platform(recipe.cluster.platform).micro_batch_tokens
    if fewer is None or "micro_batch_tokens" in recipe.actor.model_fields_set:
        return recipe
    tokens = fewer * -(-longest_sample(recipe) // fewer)
    if tokens >= recipe.actor.micro_batch_tokens:
        return recipe
    return recipe.model_copy(update={"actor": recipe.actor.model_copy(update={"micro_batch_tokens": tokens})})


def _with_default(section: Any, keys: list[str]) -> Any:
    """The section with a key at its default; as it is where there is no such section."""
    if not isinstance(section, BaseModel):
        return section
    name, *below = keys
    if below:
        value = _with_default(getattr(section, name), below)
    else:
        value = type(section).model_fields[name].get_default(call_default_factory=True)
    return section.model_copy(update={name: value})
