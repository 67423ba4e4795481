"""Finds a reward function by name or import path, and checks its signature before anything starts."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from megarl.core.errors import UserError

# Called with the keywords prompt, response, answer, metadata. It should return a number; only calling it tells.
RewardFn = Callable[..., Any]

BUILT_IN = {"math": "megarl.rewards.math:math", "exact": "megarl.rewards.exact:exact"}
PARAMETERS = ("prompt", "response", "answer", "metadata")
SIGNATURE = "(prompt: str, response: str, answer: str, metadata: dict) -> float"


def resolve_reward(fn: str, folder: Path | None = None) -> RewardFn:
    """The reward function of that name (`math`, `exact`) or import path (`pkg.module:function`).

    folder: where the user's modules are looked for first; default: the current folder.
    Raises UserError: no such name, a module that does not import (with the reason), a missing attribute (with the
    nearest), something that is not a function, or one with other parameters.
    """
    path = BUILT_IN.get(fn, fn)
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        near = get_close_matches(fn, BUILT_IN, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"reward.fn={fn!r}: not a reward function. Allowed are {', '.join(BUILT_IN)}, or an import path "
            f"pkg.module:function.{hint}"
        )
    with _importable(folder or Path.cwd()):
        module = _import(fn, module_name)
    function: Any = module
    for part in attribute.split("."):
        if not hasattr(function, part):
            near = get_close_matches(part, [name for name in dir(function) if not name.startswith("_")], n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UserError(f"reward.fn={fn!r}: {module.__file__} has no {attribute!r}.{hint}")
        function = getattr(function, part)
    _check_signature(fn, function)
    return function  # type: ignore[no-any-return]


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """A folder at the front of the import path, as `python -m` has it; command-line scripts do not."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        if entry in sys.path:  # the user's module may have changed the path too
            sys.path.remove(entry)


def _import(fn: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything while it loads
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (module_name == missing or module_name.startswith(f"{missing}.")):
            raise UserError(
                f"reward.fn={fn!r}: there is no module {missing!r} in the current folder ({Path.cwd()}) or in the "
                "installed packages. Correct the path, or start megarl from the folder that holds the module."
            ) from error
        raise UserError(
            f"reward.fn={fn!r}: the module {module_name!r} does not import: {type(error).__name__}: {error}. "
            "Mend the module, or install what it needs."
        ) from error


def _check_signature(fn: str, function: object) -> None:
    wanted = f"wanted is a function {SIGNATURE}"
    if not callable(function) or inspect.isclass(function):
        raise UserError(f"reward.fn={fn!r}: it is a {type(function).__name__}; {wanted}.")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise UserError(
            f"reward.fn={fn!r}: it is a coroutine or a generator; {wanted}, which returns the number itself."
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise UserError(f"reward.fn={fn!r}: its parameters cannot be read ({error}); {wanted}.") from error
    try:
        signature.bind(**dict.fromkeys(PARAMETERS))
    except TypeError as error:
        raise UserError(
            f"reward.fn={fn!r}: its parameters are {signature}, which cannot be called with the keywords "
            f"{', '.join(PARAMETERS)} ({error}); {wanted}."
        ) from error
