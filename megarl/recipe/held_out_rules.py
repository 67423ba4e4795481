"""The rules about held-out rows and how they are asked, as data."""

from __future__ import annotations

from megarl.recipe.agent_rules import score_names
from megarl.recipe.held_out import Eval
from megarl.recipe.rule import RL, Contradiction, Unread
from megarl.recipe.schema import Recipe


def _decides_alone(recipe: Recipe) -> bool:
    """Whether the reward is what one grader, or the environment, says, no more and no less."""
    if len(score_names(recipe)) > len(recipe.reward.by_name()):
        return not recipe.reward.by_name()
    return [grader.weight for grader in recipe.reward.by_name().values()] == [1.0]


def _greedy_many(settings: Eval) -> bool:
    return settings.samples_per_prompt > 1 and settings.temperature == 0


def _greedy_sets(recipe: Recipe) -> list[str]:
    """Names of sets of whose own settings the temperature makes nothing."""
    drawn = {"top_p", "top_k"}
    own = recipe.eval.sets.items()
    asked = {name: recipe.eval.of_set(name) for name, _ in own}
    return [
        name
        for name, each in own
        if _greedy_many(asked[name])
        or (asked[name].temperature == 0 and each.model_dump(exclude_none=True).keys() & drawn)
    ]


def _own_graders(recipe: Recipe) -> dict[str, str]:
    """Graders that sets name for themselves."""
    return {name: each.grader for name, each in recipe.eval.sets.items() if each.grader is not None}


def _unknown_graders(recipe: Recipe) -> dict[str, str]:
    return {name: grader for name, grader in _own_graders(recipe).items() if grader not in score_names(recipe)}


HELD_OUT_UNREAD: tuple[Unread, ...] = (
    Unread(
        ("eval.top_p", "eval.top_k"),
        lambda r, _: any(each.temperature > 0 for each in r.eval.by_key().values()),
        "greedy answers take the likeliest token, and nothing is drawn: set eval.temperature above 0",
        RL,
    ),
    Unread(
        (
            "eval.before",
            "eval.every",
            "eval.temperature",
            "eval.top_p",
            "eval.top_k",
            "eval.max_response_tokens",
            "eval.samples_per_prompt",
            "eval.max_prompts",
            "eval.grader",
            "eval.set_key",
            "eval.sets",
        ),
        lambda r, _: r.data.eval is not None,
        "there are no held-out rows to evaluate on: set data.eval to a file",
        RL,
    ),
    Unread(
        ("eval.sets",),
        lambda r, _: r.eval.set_key is not None,
        "nothing says which set a row is of: set eval.set_key to the field that does",
        RL,
    ),
    Unread(
        ("eval.grader",),
        lambda r, _: not _decides_alone(r) or r.eval.grader not in score_names(r),
        "the only grader's score is the reward: give reward.graders another one, or this one another weight",
        RL,
    ),
)

HELD_OUT_CONTRADICTIONS: tuple[Contradiction, ...] = (
    Contradiction(
        "eval.grader",
        lambda r, _: r.eval.grader is not None and r.eval.grader not in score_names(r),
        lambda r: f"there is no grader {r.eval.grader!r}. The recipe's graders: {', '.join(score_names(r))}",
        RL,
    ),
    Contradiction(
        "eval.samples_per_prompt",
        lambda r, _: _greedy_many(r.eval),
        lambda r: (
            f"{r.eval.samples_per_prompt} greedy answers to one prompt are all the same. "
            "Set eval.temperature above 0, or eval.samples_per_prompt to 1"
        ),
        RL,
    ),
    Contradiction(
        "eval.sets",
        lambda r, _: bool(_greedy_sets(r)),
        lambda r: (
            f"the answers to rows of {_greedy_sets(r)[0]} are greedy: several to one prompt are all the same, and top_p and "
            f"top_k draw nothing. Set eval.sets.{_greedy_sets(r)[0]}.temperature above 0, or its samples_per_prompt to 1 without "
            "these two"
        ),
        RL,
    ),
    Contradiction(
        "eval.sets",
        lambda r, _: bool(_unknown_graders(r)),
        lambda r: (
            "{}: there is no grader {!r}. ".format(*next(iter(_unknown_graders(r).items())))
            + f"The recipe's graders: {', '.join(score_names(r))}"
        ),
        RL,
    ),
    Contradiction(
        "eval.sets",
        lambda r, _: bool(_own_graders(r)) and not _unknown_graders(r) and _decides_alone(r),
        lambda r: (
            f"{next(iter(_own_graders(r)))}.grader: the only grader's score is the reward. Remove it, or give reward.graders "
            "another one, or this one another weight"
        ),
        RL,
    ),
)
