"""The rule about train.keep_best: a metric that the run writes, or else no checkpoint would ever be the best."""

from __future__ import annotations

import math
import re

from megarl.core.metrics import METRICS, row_of
from megarl.recipe.keep import pass_counts, pass_counts_of_all
from megarl.recipe.rule import Contradiction
from megarl.recipe.schema import AnyRecipe, Recipe
from megarl.recipe.supervised import DpoRecipe, KtoRecipe, RmRecipe

_SET = "eval/set/"
_OF_AGENT = "eval/turns_mean"
_BY = "eval/by/"  # what an environment counts, or, before another slash, what a grader says beside its score


def set_of(metric: str) -> str | None:
    """The set of held-out rows that a metric is of; None where it is of all. A set's name may have slashes."""
    return metric.removeprefix(_SET).rpartition("/")[0] if metric.startswith(_SET) else None


def held_out_metrics(recipe: AnyRecipe, held_out_set: str = "NAME") -> list[str]:
    """What a run of the recipe writes of held-out rows; NAME stands for what rows or an environment name.

    held_out_set: whose answers to a prompt are counted.
    """
    if not isinstance(recipe, Recipe):
        kinds = {RmRecipe: "rm", DpoRecipe: "dpo", KtoRecipe: "kto"}
        kind = next((name for each, name in kinds.items() if isinstance(recipe, each)), "sft")
        return [name for name in METRICS if name.startswith(f"{kind}/eval_")]
    found: list[str] = []
    for name in (each for each in METRICS if each.startswith("eval/")):
        if (name.startswith(_SET) and recipe.eval.set_key is None) or (name == _OF_AGENT and recipe.agent is None):
            continue
        of_set = pass_counts(recipe.eval.of_set(held_out_set).samples_per_prompt)
        counts = of_set if name.startswith(_SET) else pass_counts_of_all(recipe.eval)
        found += [name.replace("at_K", f"at_{count}") for count in counts] if name.endswith("_K") else [name]
    return found


def _written(recipe: AnyRecipe, metric: str) -> bool:
    """Whether a run of the recipe writes the metric; of which sets and by which names, its rows and its environment say."""
    count = re.search(r"/pass_at_(\d+)$", metric)
    name = row_of(metric).replace("at_K", f"at_{count[1]}") if count else row_of(metric)
    if isinstance(recipe, Recipe) and metric.startswith(_BY) and recipe.agent is None:
        return metric.removeprefix(_BY).partition("/")[0] in recipe.reward.by_name()
    return name in held_out_metrics(recipe, set_of(metric) or "NAME")


def keep_notes(recipe: AnyRecipe) -> tuple[str, ...]:
    """A line where no step before the end is both saved and evaluated, so that there is none that could be the best."""
    keep, save, every = recipe.train.keep_best, recipe.train.save_every, recipe.eval.every
    if keep is None or not save or not every or (both := math.lcm(save, every)) < recipe.train.steps:
        return ()
    return (
        f"train.keep_best: steps are saved every {save} and evaluated every {every}, so that step {both} would be the first that "
        f"is both, and the run has {recipe.train.steps}: only the last could be kept as the best. Make one a multiple of the "
        "other",
    )


KEEP_CONTRADICTION = Contradiction(
    "train.keep_best",
    lambda r, _: r.train.keep_best is not None and not _written(r, r.train.keep_best.metric),
    lambda r: (
        f"{r.train.keep_best.metric} is no metric that this run writes, and none would be the best by it. Name one of "
        f"{', '.join(held_out_metrics(r))}, or remove the key"
    ),
)
