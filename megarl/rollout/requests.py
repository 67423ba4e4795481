"""How a run's samples and held-out answers are asked for, of what the recipe says. Not for asking (asking.py)."""

from __future__ import annotations

from dataclasses import replace

from megarl.core.platform import get_platform
from megarl.core.types import Prompt
from megarl.recipe.functions import asked as asked_of
from megarl.recipe.held_out import Eval
from megarl.recipe.schema import Recipe, Rollout
from megarl.serving.sampling import Sampling


def train_sampling(recipe: Recipe, prompt: Prompt) -> Sampling:
    """Of a step's samples."""
    settings = recipe.rollout
    sampling = Sampling(
        settings.max_response_tokens,
        settings.temperature,
        settings.top_p,
        settings.top_k,
        settings.stop,
        recipe.actor.routing_replay,
        alone=settings.deterministic,
        by_rank=draws_by_rank(recipe, held_out=False),
    )
    return _bounded(sampling, prompt)


def held_out_sampling(recipe: Recipe, prompt: Prompt) -> Sampling:
    """Of a held-out answer, as the row's set is asked."""
    asked = recipe.eval.of_row(prompt.metadata)
    sampling = Sampling(
        asked.max_response_tokens or recipe.rollout.max_response_tokens,
        asked.temperature,
        asked.top_p,
        asked.top_k,
        stop=recipe.rollout.stop,
        alone=recipe.rollout.deterministic,
        by_rank=draws_by_rank(recipe, held_out=True),
    )
    return _bounded(sampling, prompt)


def draws_by_rank(recipe: Recipe, *, held_out: bool) -> bool:
    """Whether requests that leave no token out are drawn as those that do, because some of these may be in their batch.

    held_out: those of an evaluation, which meet a step's samples with eval.overlap alone.
    """
    if not (recipe.rollout.deterministic and get_platform(recipe.cluster.platform).draws_by_rank):
        return False
    sets = recipe.eval.by_key().values() if recipe.data.eval is not None else ()
    evaluation = any(_leaves_out(each) for each in sets)
    compares = "greedy_rewards" in asked_of(recipe.algorithm, "may ask for all").advantage
    step = _leaves_out(recipe.rollout) or compares
    if recipe.eval.overlap:
        return step or evaluation
    return evaluation if held_out else step


def _leaves_out(asked: Eval | Rollout) -> bool:
    """Whether requests are greedy or filter."""
    return asked.temperature == 0 or asked.top_p < 1 or asked.top_k > 0


def _bounded(sampling: Sampling, prompt: Prompt) -> Sampling:
    """With no more tokens than the row itself allows."""
    own = prompt.max_response_tokens
    return sampling if own is None else replace(sampling, max_tokens=min(sampling.max_tokens, own))
