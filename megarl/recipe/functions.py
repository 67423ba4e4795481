"""The functions that a recipe's algorithm names: what they ask for, and what they are given beside their inputs.

What a run reads of its recipe follows from here: a function's parameters say what it asks for (algorithms/inputs.py). The
user's own functions, named by import path, are imported when they are looked at, and not to read a recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from megarl.algorithms.inputs import (
    LOSS_INPUTS,
    SAMPLE_ADVANTAGES,
    SAMPLE_INPUTS,
    TOKEN_ADVANTAGES,
    TOKEN_INPUTS,
    WHITENED,
    check_function,
    parameters,
    wanted,
)
from megarl.algorithms.policy_loss import POLICY_LOSSES
from megarl.core.errors import UserError
from megarl.core.importing import import_attribute
from megarl.core.words import with_article
from megarl.recipe.algorithm import Algorithm

ADVANTAGE, POLICY_LOSS = "algorithm.advantage", "algorithm.policy_loss"
ADVANTAGES: Mapping[str, Callable[..., Any]] = MappingProxyType({**SAMPLE_ADVANTAGES, **TOKEN_ADVANTAGES})
ADVANTAGE_INPUTS: Mapping[str, str] = MappingProxyType({**SAMPLE_INPUTS, **TOKEN_INPUTS})
# The keys of the section that a function may ask for, beside those of algorithm.settings.
SETTINGS = (
    *("normalize_std", "gamma", "lam", "clip_low", "clip_high", "dual_clip"),
    *("distill_beta", "distill_forward_weight"),
)
# Inputs that a role of the run has to make, and the keys that bring it.
ROLE_INPUTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "values": ("critic", "add a section `critic`"),
        "teacher_logprobs": ("teacher", "add a section `teacher` with its path or servers"),
        "top_logprobs": ("teacher", "add a section `teacher` with its path or servers"),
        "teacher_top_logprobs": ("teacher", "add a section `teacher` with its path or servers"),
        "ref_logprobs": ("reference", "set algorithm.kl_coef above 0"),
    }
)
# What policy and teacher say of the teacher's likeliest tokens.
OF_TOP = frozenset({"top_logprobs", "teacher_top_logprobs"})
# Advantages that are whitened by their own formula, whatever algorithm.whiten says.
WHITE_BY_FORMULA = frozenset({*WHITENED, "reinforce_pp_baseline"})
# What the recipe's rewards, and all that is added to them or taken off, come to a function as.
REWARDS = frozenset({"rewards", "token_rewards"})
# How a function that is named by import path counts, which nobody looks at before a run is checked whole.
Own = Literal["look", "may ask for all", "asks for nothing"]


@dataclass(frozen=True)
class Asked:
    """What an algorithm's two functions ask for: names of inputs and of settings.

    advantage: nothing where the policy loss asks for no advantages, for then nobody calls it.
    """

    advantage: frozenset[str]
    policy_loss: frozenset[str]

    @property
    def advantages(self) -> bool:
        """Whether advantages are asked for."""
        return "advantages" in self.policy_loss

    @property
    def rewards(self) -> bool:
        """Whether rewards are asked for: those of samples, or of tokens."""
        return bool(self.advantage & REWARDS)

    @property
    def token_rewards(self) -> bool:
        """Whether what tokens are rewarded or charged with is asked for: a function of samples has it in their rewards."""
        of_samples = not self.advantage & TOKEN_INPUTS.keys()
        return "token_rewards" in self.advantage or ("rewards" in self.advantage and of_samples)

    @property
    def teacher_top(self) -> bool:
        """Whether what is said of the teacher's likeliest tokens is asked for."""
        return bool(self.policy_loss & OF_TOP)

    @property
    def teacher(self) -> bool:
        """Whether anything is asked of a teacher."""
        return self.teacher_top or self.by_either("teacher_logprobs")

    def by_either(self, name: str) -> bool:
        """Whether one of the two asks for it."""
        return name in self.advantage | self.policy_loss


def is_own(name: str) -> bool:
    """Whether a function is the user's, named by import path."""
    return ":" in name


def asked(algorithm: Algorithm, own: Own) -> Asked:
    """What is asked for. own: how a function named by import path counts.

    Raises UserError, where one has to be looked at, for a path that leads nowhere.
    """

    def names(
        function: str, find: Callable[[Algorithm], Callable[..., Any]], inputs: Mapping[str, str]
    ) -> frozenset[str]:
        possible = frozenset({*inputs, *settings(algorithm)})
        if is_own(function) and own != "look":
            return possible if own == "may ask for all" else frozenset()
        return possible & frozenset(parameters(find(algorithm)))

    loss = names(algorithm.policy_loss, policy_loss_function, LOSS_INPUTS)
    if "advantages" not in loss:
        return Asked(frozenset(), loss)
    return Asked(names(algorithm.advantage, advantage_function, ADVANTAGE_INPUTS), loss)


def advantage_function(algorithm: Algorithm) -> Callable[..., Any]:
    """By name or import path. Raises UserError for a path that leads nowhere."""
    return ADVANTAGES.get(algorithm.advantage) or _function(algorithm.advantage, ADVANTAGE)


def policy_loss_function(algorithm: Algorithm) -> Callable[..., Any]:
    """By name or import path. Raises UserError for a path that leads nowhere."""
    return POLICY_LOSSES.get(algorithm.policy_loss) or _function(algorithm.policy_loss, POLICY_LOSS)


def is_per_token(advantage: Callable[..., Any]) -> bool:
    """Whether an advantage is one number a token: it asks for something that tokens have."""
    return bool(wanted(advantage, TOKEN_INPUTS))


def is_whitened(algorithm: Algorithm) -> bool:
    """Whether what the advantage's function gives is whitened: where the recipe says nothing, GAE's alone."""
    return algorithm.advantage == "gae" if algorithm.whiten is None else algorithm.whiten


def before_whitening(algorithm: Algorithm) -> tuple[Callable[..., Any], bool]:
    """An advantage's function without the whitening at its end, if it has one, and whether its result has to be whitened.

    For where a step lies in several parts: whitening is over all of them. Raises UserError for a path that leads nowhere.
    """
    raw = WHITENED.get(algorithm.advantage)
    if raw is not None:
        return raw, True
    return advantage_function(algorithm), is_whitened(algorithm)


def needs_one_collector(algorithm: Algorithm) -> bool:
    """Whether the advantage has to see all tokens of a step in one place: a user's own function of tokens does.

    Raises UserError for a path that leads nowhere.
    """
    if not is_own(algorithm.advantage) or not asked(algorithm, "look").advantages:
        return False
    return is_per_token(advantage_function(algorithm))


def settings(algorithm: Algorithm) -> dict[str, Any]:
    """What a function of the algorithm may ask for by name, beside its inputs."""
    return {**{name: getattr(algorithm, name) for name in SETTINGS}, **algorithm.settings}


def check_algorithm(algorithm: Algorithm, roles: set[str]) -> None:
    """Functions that exist, parameters that something fills, and roles that make their inputs. Raises UserError.

    roles: those of the run.
    """
    loss, unknown = policy_loss_function(algorithm), set(algorithm.settings)
    checked = [(loss, LOSS_INPUTS, f"{POLICY_LOSS}: {algorithm.policy_loss}")]
    if asked(algorithm, "look").advantages:
        advantage = advantage_function(algorithm)
        checked.append((advantage, ADVANTAGE_INPUTS, f"{ADVANTAGE}: {algorithm.advantage}"))
    for function, inputs, where in checked:
        _check(function, inputs, algorithm, where, roles)
        unknown -= set(parameters(function))
    if unknown:
        raise UserError(
            f"algorithm.settings has {', '.join(sorted(unknown))}, for which neither the advantage nor the loss has a "
            "parameter. Remove them, or correct their names."
        )


def _check(
    function: Callable[..., Any], inputs: Mapping[str, str], algorithm: Algorithm, where: str, roles: set[str]
) -> None:
    check_function(function, inputs, settings(algorithm), where)
    for name in sorted(wanted(function, inputs) & set(ROLE_INPUTS)):
        role, remedy = ROLE_INPUTS[name]
        if role not in roles:
            raise UserError(f"{where} asks for {name}, which only a {role} can give: {remedy}.")


def _function(path: str, key: str) -> Callable[..., Any]:
    found = import_attribute(path, key)
    if not callable(found):
        raise UserError(f"{key}={path!r}: it is {with_article(type(found).__name__)}, not a function.")
    function: Callable[..., Any] = found
    return function
