"""When the actor goes through a step's samples before it learns from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.recipe.algorithm import Algorithm, Correction
from megarl.recipe.layouts import role_layouts
from megarl.recipe.roles import Actor, Teacher
from megarl.recipe.scoring import old_logprobs_given, scored_first, served_columns
from megarl.recipe.servers import TeacherServers
from tests.rollout.steps import recipe_of


def of_log_probs(logprobs: Any, rewards: Any) -> Any:
    """An advantage that reads the trainer's log-probs before the update."""


OWN = f"{__name__}:of_log_probs"


@pytest.mark.parametrize(
    ("algorithm", "actor", "expected"),
    [
        ({}, {}, None),
        ({"advantage": "gae"}, {}, None),
        ({}, {"epochs": 2}, "all"),
        ({}, {"epochs": 2, "mini_batch_samples": 1}, "all"),
        ({}, {"mini_batch_samples": 1}, "later"),
        ({"kl_coef": 0.1}, {"mini_batch_samples": 1}, "later"),
        ({"old_logprobs": "rollout"}, {"epochs": 2}, None),
        ({"old_logprobs": "rollout"}, {"mini_batch_samples": 1}, None),
        ({"correction": Correction()}, {}, "all"),
        ({"max_logprob_diff": 0.1}, {"mini_batch_samples": 1}, "all"),
        ({"kl_coef": 0.1}, {}, None),
        ({"kl_coef": 0.1, "kl_in": "reward"}, {}, "all"),
        ({"advantage": OWN}, {}, "all"),
    ],
)
def test_a_pass_of_its_own_is_of_the_samples_that_need_it(
    algorithm: dict[str, Any], actor: dict[str, Any], expected: str | None
) -> None:
    recipe = recipe_of(Algorithm(**algorithm), actor=Actor(**actor))
    assert scored_first(recipe) == expected
    assert old_logprobs_given(recipe) is (expected == "all" or recipe.algorithm.old_logprobs == "rollout")


def test_a_function_that_nobody_looks_at_may_need_it() -> None:
    recipe = recipe_of(Algorithm(advantage="package.that_is_not_there:function"))
    assert scored_first(recipe, "may ask for all") == "all"


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({"policy_loss": "distill"}, {"teacher_logprobs": ()}),
        ({"advantage": "distill"}, {"teacher_logprobs": ()}),
        ({"policy_loss": "distill_top", "distill_top_k": 5}, {"teacher_top": (11,)}),
    ],
)
def test_what_a_served_teacher_says_comes_with_the_samples_and_no_rank_holds_it(
    algorithm: dict[str, Any], expected: dict[str, tuple[int, ...]]
) -> None:
    served = Teacher(servers=TeacherServers(urls=("http://a:1",)))
    recipe = recipe_of(Algorithm(**algorithm), teacher=served)
    assert served_columns(recipe) == expected and set(role_layouts(recipe)) & {"teacher"} == set()
    held = recipe_of(Algorithm(**algorithm), teacher=Teacher(path=Path("t")))
    assert served_columns(held) == {} and "teacher" in role_layouts(held)
