"""The functions that a recipe's algorithm names, and what they are given beside their inputs. Without torch when it loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megarl.algorithms.inputs import (
    LOSS_INPUTS,
    SAMPLE_ADVANTAGES,
    SAMPLE_INPUTS,
    TOKEN_ADVANTAGES,
    TOKEN_INPUTS,
    check_function,
    wanted,
)
from megarl.core.errors import UserError
from megarl.core.importing import import_attribute
from megarl.recipe.algorithm import Algorithm

ADVANTAGE, POLICY_LOSS = "algorithm.advantage", "algorithm.policy_loss"
# Inputs that a role of the run has to make, and the keys that bring it.
ROLE_INPUTS: Mapping[str, tuple[str, str]] = {
    "values": ("critic", "add a section `critic`"),
    "teacher_logprobs": ("teacher", "add a section `teacher` with its path"),
    "ref_logprobs": ("reference", "set algorithm.kl_coef above 0"),
}


def advantage_function(algorithm: Algorithm) -> Callable[..., Any]:
    """By name or import path. Raises UserError for a path that leads nowhere."""
    known = {**SAMPLE_ADVANTAGES, **TOKEN_ADVANTAGES}
    return known.get(algorithm.advantage) or _function(algorithm.advantage, ADVANTAGE)


def policy_loss_function(algorithm: Algorithm) -> Callable[..., Any]:
    """By name or import path. Raises UserError for a path that leads nowhere."""
    from megarl.algorithms.policy_loss import POLICY_LOSSES

    return POLICY_LOSSES.get(algorithm.policy_loss) or _function(algorithm.policy_loss, POLICY_LOSS)


def is_per_token(advantage: Callable[..., Any]) -> bool:
    """Whether an advantage is one number a token: it asks for something that tokens have."""
    return bool(wanted(advantage, TOKEN_INPUTS))


def settings(algorithm: Algorithm) -> dict[str, Any]:
    """What a function of the algorithm may ask for by name, beside its inputs."""
    return {
        "normalize_std": algorithm.normalize_std,
        "gamma": algorithm.gamma,
        "lam": algorithm.lam,
        "clip_low": algorithm.clip_low,
        "clip_high": algorithm.clip_high,
        "dual_clip": algorithm.dual_clip,
        **algorithm.settings,
    }


def check_algorithm(algorithm: Algorithm, roles: set[str]) -> None:
    """Functions that exist, parameters that something fills, and roles that make their inputs. Raises UserError.

    roles: those of the run. Only a loss that is named by import path is imported: the built-in ones need torch.
    """
    advantage = advantage_function(algorithm)
    _check(advantage, {**SAMPLE_INPUTS, **TOKEN_INPUTS}, algorithm, f"{ADVANTAGE}: {algorithm.advantage}", roles)
    unknown = set(algorithm.settings)
    if ":" in algorithm.policy_loss:
        loss = policy_loss_function(algorithm)
        _check(loss, LOSS_INPUTS, algorithm, f"{POLICY_LOSS}: {algorithm.policy_loss}", roles)
        unknown -= wanted(loss, dict.fromkeys(unknown, ""))
    unknown -= wanted(advantage, dict.fromkeys(unknown, ""))
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
        raise UserError(f"{key}={path!r}: it is a {type(found).__name__}, not a function.")
    function: Callable[..., Any] = found
    return function
