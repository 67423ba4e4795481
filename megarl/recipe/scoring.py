"""Where the log-probs of the policy that sampled come from: the servers, a pass of the trainer, or its update.

And what a teacher is asked.
"""

from __future__ import annotations

from megarl.core.types import TEACHER_LOGPROBS, TEACHER_TOP, MiniBatches
from megarl.recipe.functions import Own, asked
from megarl.recipe.schema import Recipe


def scored_first(recipe: Recipe, own: Own = "look") -> MiniBatches | None:
    """Of which samples the trainer's log-probs, of the policy that sampled, take a pass of their own in each step; None: of none.

    Where nothing before the update asks for them, those of the first mini-batch take none: the update's forward pass computes
    the same numbers with the same weights, and its loss takes them from there. own: see `functions.asked`, which this calls.
    """
    algorithm, actor, rollout = recipe.algorithm, recipe.actor, recipe.rollout
    if algorithm.old_logprobs == "rollout":
        return None
    if (
        actor.epochs > 1
        or algorithm.correction is not None
        or algorithm.max_logprob_diff is not None
        or (algorithm.kl_in == "reward" and algorithm.kl_coef > 0)
        or "logprobs" in asked(algorithm, own).advantage
    ):
        return "all"
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    return "later" if (actor.mini_batch_samples or samples) < samples else None


def asked_of_teacher(recipe: Recipe) -> tuple[bool, bool]:
    """Whether the teacher is asked for its log-probs of the samples' tokens, and for its likeliest tokens."""
    found = asked(recipe.algorithm, "look")
    return found.by_either("teacher_logprobs"), found.teacher_top


def served_columns(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """Columns of what a teacher behind an address says, which come with the samples; none where ranks hold the teacher.

    By name, what follows [T] in their shapes: of k likeliest tokens, their ids, their log-probs, and that of all others.
    """
    if recipe.teacher is None or recipe.teacher.servers is None:
        return {}
    of_samples, of_top = asked_of_teacher(recipe)
    shapes: dict[str, tuple[int, ...]] = {TEACHER_LOGPROBS: ()} if of_samples else {}
    return shapes | ({TEACHER_TOP: (2 * recipe.algorithm.distill_top_k + 1,)} if of_top else {})


def old_logprobs_given(recipe: Recipe) -> bool:
    """Whether a step's first mini-batch is given them: the servers' own, or those of a pass; else its loss takes its own."""
    return recipe.algorithm.old_logprobs == "rollout" or scored_first(recipe) == "all"
