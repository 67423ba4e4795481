"""Functions by name and by import path, what they ask for, and what is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.algorithms.advantage import rloo_advantages
from megarl.algorithms.policy_loss import gspo_loss
from megarl.algorithms.returns import gae
from megarl.core.errors import UserError
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.functions import (
    advantage_function,
    asked,
    check_algorithm,
    is_per_token,
    policy_loss_function,
    settings,
)

EVERY_ROLE = {"actor", "reference", "critic", "teacher"}


def by_median(rewards: Any, group_index: Any, scale: float = 1.0) -> Any:
    """A user's advantage."""


def gains_only(logprobs: Any, old_logprobs: Any, advantages: Any, clip_low: float, floor: float) -> Any:
    """A user's loss, with a setting of its own."""


def from_the_teacher(logprobs: Any, teacher_logprobs: Any) -> Any:
    """A user's loss that asks for no advantages."""


def nothing_to_work_on(scale: float = 1.0) -> Any:
    """Asks for no input."""


NOT_A_FUNCTION = 3


def mine(name: str) -> str:
    return f"{__name__}:{name}"


def test_names_and_paths_lead_to_functions() -> None:
    assert advantage_function(Algorithm(advantage="rloo")) is rloo_advantages
    assert advantage_function(Algorithm(advantage="gae")) is gae
    assert advantage_function(Algorithm(advantage=mine("by_median"))) is by_median
    assert policy_loss_function(Algorithm(policy_loss="gspo")) is gspo_loss
    assert policy_loss_function(Algorithm(policy_loss=mine("gains_only"))) is gains_only
    assert is_per_token(gae) and not is_per_token(by_median)


def test_settings_are_the_recipes_and_the_users_on_top() -> None:
    found = settings(Algorithm(gamma=0.9, clip_high=0.3, settings={"floor": 2.0}))
    assert (found["gamma"], found["clip_high"], found["floor"]) == (0.9, 0.3, 2.0)


def test_what_is_asked_for_is_said_by_parameters() -> None:
    gae_and_ppo = asked(Algorithm(advantage="gae"), "look")
    assert gae_and_ppo.advantage == {"token_rewards", "values", "mask", "cu_seqlens", "gamma", "lam"}
    assert gae_and_ppo.by_either("clip_low") and not gae_and_ppo.by_either("normalize_std")
    assert gae_and_ppo.advantages and gae_and_ppo.rewards
    assert not asked(Algorithm(advantage="distill"), "look").rewards


def test_nobody_calls_an_advantage_that_the_loss_does_not_ask_for() -> None:
    for algorithm in (
        Algorithm(advantage="gae", policy_loss="distill"),
        Algorithm(advantage="nowhere.at:all", policy_loss=mine("from_the_teacher")),
    ):
        found = asked(algorithm, "look")
        assert not found.advantages and not found.rewards and found.advantage == frozenset()
        assert found.by_either("teacher_logprobs")


def test_a_function_that_was_not_looked_at_may_ask_for_all_or_nothing() -> None:
    algorithm = Algorithm(advantage=mine("by_median"), policy_loss=mine("gains_only"), settings={"scale": 2.0})
    most, least, exact = (asked(algorithm, own) for own in ("may ask for all", "asks for nothing", "look"))
    assert exact.advantage == {"rewards", "group_index", "scale"} and not exact.by_either("gamma")
    for name in ("values", "greedy_rewards", "gamma", "scale", "teacher_logprobs"):
        assert most.by_either(name) and not least.by_either(name)


@pytest.mark.parametrize(
    "name",
    [
        "grpo",
        "grpo_loo",
        "rloo",
        "reinforce_pp_baseline",
        "remax",
        "opo",
        "gpg",
        "egpo",
        "gdpo",
        "reinforce_pp",
        "grpo_turns",
    ],
)
def test_what_needs_no_role_needs_none(name: Any) -> None:
    check_algorithm(Algorithm(advantage=name), {"actor"})


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        (Algorithm(advantage="gae"), "asks for values, which only a critic can give: add a section `critic`"),
        (Algorithm(advantage="distill"), "asks for teacher_logprobs, which only a teacher can give"),
        (Algorithm(advantage="no_such_package.at:all"), "there is no module 'no_such_package'"),
        (Algorithm(advantage=mine("by_medium")), "Did you mean 'by_median'"),
        (Algorithm(advantage=mine("NOT_A_FUNCTION")), "it is an int, not a function"),
        (Algorithm(advantage=mine("nothing_to_work_on")), "asks for none of"),
        (Algorithm(policy_loss=mine("gains_only")), "parameters that nothing fills: floor"),
        (Algorithm(advantage=mine("by_median"), settings={"scal": 2.0}), "algorithm.settings has scal"),
    ],
)
def test_what_cannot_work_is_refused_in_words(algorithm: Algorithm, says: str) -> None:
    with pytest.raises(UserError) as caught:
        check_algorithm(algorithm, {"actor"})
    assert says in str(caught.value)


def test_with_its_roles_and_settings_everything_is_fine() -> None:
    check_algorithm(Algorithm(advantage="gae"), EVERY_ROLE)
    own = Algorithm(advantage=mine("by_median"), policy_loss=mine("gains_only"), settings={"scale": 2.0, "floor": 0.0})
    check_algorithm(own, {"actor"})
