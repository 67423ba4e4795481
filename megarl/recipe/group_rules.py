"""The rules about groups that are not trained on, as data: dynamic sampling, and which groups it keeps."""

from __future__ import annotations

from megarl.algorithms.inputs import parameters
from megarl.recipe.agent_rules import score_names
from megarl.recipe.functions import ADVANTAGES, is_own
from megarl.recipe.rule import RL, Contradiction, Unread
from megarl.recipe.schema import Recipe


def dropped_note(recipe: Recipe) -> str:
    """Groups whose rewards are all equal teach nothing only where each is compared with itself, and by these rewards alone."""
    algorithm, agent = recipe.algorithm, recipe.agent
    function = ADVANTAGES.get(algorithm.advantage)
    if not algorithm.drop_zero_variance_groups or algorithm.keep_groups is not None or function is None:
        return ""
    if {"group_index", "sequence_groups"}.isdisjoint(parameters(function)):
        why = f"algorithm.advantage: {algorithm.advantage} does not compare samples of a group with each other"
    elif "reward_parts" in parameters(function):
        why = f"algorithm.advantage: {algorithm.advantage} goes by each grader's scores, which may differ all the same"
    elif algorithm.kl_coef > 0 and algorithm.kl_in == "reward":
        why = "algorithm.kl_in: reward makes their rewards unequal afterwards"
    elif agent is not None and agent.credit == "turn":
        why = "with agent.credit: turn episodes that earn the same may earn it in other turns, and turns are compared"
    else:
        return ""
    return (
        f"algorithm.drop_zero_variance_groups drops groups that would have been learned from: {why}. Set it to false to learn "
        "from all."
    )


def _kept_by(recipe: Recipe) -> str | None:
    """The grader by whose scores groups are kept; None where it is the reward."""
    return None if recipe.algorithm.keep_groups is None else recipe.algorithm.keep_groups.grader


def _grades_some(recipe: Recipe) -> bool:
    """Whether the grader by whose scores groups are kept grades some rows alone."""
    grader = recipe.reward.by_name().get(_kept_by(recipe) or "")
    return grader is not None and bool(grader.only)


def _keeps_none(recipe: Recipe) -> bool:
    keep = recipe.algorithm.keep_groups
    return keep is not None and keep.above is not None and keep.below is not None and keep.above >= keep.below


GROUP_UNREAD: tuple[Unread, ...] = (
    Unread(
        ("algorithm.keep_groups",),
        lambda r, _: r.algorithm.drop_zero_variance_groups,
        "it says which groups are kept, and none is dropped: set algorithm.drop_zero_variance_groups to true",
        RL,
    ),
    Unread(
        ("algorithm.refill_rounds",),
        lambda r, _: r.algorithm.drop_zero_variance_groups,
        "nothing is dropped that could be asked again: set algorithm.drop_zero_variance_groups to true",
        RL,
    ),
)

GROUP_CONTRADICTIONS: tuple[Contradiction, ...] = (
    Contradiction(
        "algorithm.drop_zero_variance_groups",
        lambda r, _: r.rollout.samples_per_prompt < 2 and r.algorithm.drop_zero_variance_groups,
        lambda r: (
            "with rollout.samples_per_prompt: 1 the rewards of each group are all equal, so that every sample would be "
            "dropped. Set it to false, or rollout.samples_per_prompt to 2 or more"
        ),
        RL,
    ),
    Contradiction(
        "algorithm.drop_zero_variance_groups",
        lambda r, _: (
            r.reward_model is not None
            and r.algorithm.drop_zero_variance_groups
            and (r.algorithm.keep_groups is None or r.algorithm.keep_groups.grader is None)
        ),
        lambda r: (
            "groups are dropped by what the graders say, before the reward model scores them. Set it to false, remove the reward "
            "model, or say by which grader in algorithm.keep_groups.grader"
        ),
        RL,
    ),
    Contradiction(
        "algorithm.drop_zero_variance_groups",
        lambda r, asked: (
            r.algorithm.drop_zero_variance_groups
            and not is_own(r.algorithm.advantage)
            and bool(asked.advantage & {"greedy_rewards", "mean_nll"})
        ),
        lambda r: (
            f"algorithm.advantage: {r.algorithm.advantage} learns from groups whose rewards are all equal, too. Set it to false"
        ),
        RL,
    ),
    Contradiction(
        "algorithm.keep_groups.grader",
        lambda r, _: _kept_by(r) is not None and _kept_by(r) not in score_names(r),
        lambda r: f"there is no grader {_kept_by(r)!r}. The recipe's graders: {', '.join(score_names(r))}",
        RL,
    ),
    Contradiction(
        "algorithm.keep_groups.grader",
        lambda r, _: _grades_some(r),
        lambda r: (
            f"{_kept_by(r)} grades some rows alone (reward.graders.{_kept_by(r)}.only), and groups of others have no score of "
            "its. Name one that grades all rows, or none: then the whole reward counts"
        ),
        RL,
    ),
    Contradiction(
        "algorithm.keep_groups.below",
        lambda r, _: _keeps_none(r),
        lambda r: f"it has to be over above {r.algorithm.keep_groups.above:g}; got {r.algorithm.keep_groups.below:g}",
        RL,
    ),
)
