"""Finds a reward function by name or import path, and checks its signature before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.core.errors import UserError
from megarl.core.importing import import_attribute
from megarl.core.words import did_you_mean, with_article

# Called with the keywords of PARAMETERS, and those of OPTIONAL that it names. It should return a number; only calling it tells.
RewardFn = Callable[..., Any]

BUILT_IN = {"math": "megarl.rewards.math:math", "exact": "megarl.rewards.exact:exact"}
PARAMETERS = ("prompt", "response", "answer", "metadata")
OPTIONAL = ("truncated",)  # for who names them: a function that hands `**rest` on may not know them
SIGNATURE = "(prompt: str, response: str, answer: str, metadata: dict) -> float"


def resolve_reward(fn: str, folder: Path | None = None, *, key: str = "reward.fn") -> RewardFn:
    """The reward function of that name (`math`, `exact`) or import path (`pkg.module:function`).

    folder: where the user's modules are looked for first; default: the current folder. key: where the name stands in
    the recipe, for messages.
    Raises UserError: no such name, a module that does not import (with the reason), a missing attribute (with the
    nearest), something that is not a function, or one with other parameters.
    """
    path = BUILT_IN.get(fn, fn)
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        hint = did_you_mean(fn, BUILT_IN, quoted=True)
        raise UserError(
            f"{key}={fn!r}: not a reward function. Allowed are {', '.join(BUILT_IN)}, or an import path "
            f"pkg.module:function.{hint}"
        )
    function = import_attribute(path, key, folder)
    _check_signature(f"{key}={fn!r}", function)
    return function  # type: ignore[no-any-return]


def asked_for(function: Callable[..., Any]) -> list[str]:
    """Which of OPTIONAL a function has among its parameters, by name."""
    parameters = inspect.signature(function).parameters
    # Of a function that wraps another, what it hands on counts, and what it takes itself.
    taken = inspect.signature(function, follow_wrapped=False).parameters
    rest = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
    return [name for name in OPTIONAL if name in parameters and (rest or name in taken)]


def _check_signature(where: str, function: object) -> None:
    wanted = f"wanted is a function {SIGNATURE}"
    if not callable(function) or inspect.isclass(function):
        raise UserError(f"{where}: it is {with_article(type(function).__name__)}; {wanted}.")
    called = (function, type(function).__call__)  # of an object the class says what calling it gives
    if any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in called):
        raise UserError(f"{where}: it is a generator; {wanted}, which returns the number itself.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: its parameters cannot be read ({error}); {wanted}.") from error
    try:
        signature.bind(**dict.fromkeys([*PARAMETERS, *asked_for(function)]))
    except TypeError as error:
        raise UserError(
            f"{where}: its parameters are {signature}, which cannot be called with the keywords "
            f"{', '.join(PARAMETERS)} ({error}); {wanted}."
        ) from error
