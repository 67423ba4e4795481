"""The class that a recipe names to write metrics with (`report.writer`): what it may ask for, and what it needs to have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from megarl.core.errors import UserError
from megarl.core.importing import import_attribute
from megarl.core.words import with_article

KEY = "report.writer"
# What its class may ask for, by the names of its parameters.
GIVEN = ("folder", "recipe", "resumed_step")
METHODS: Mapping[str, tuple[str, ...]] = MappingProxyType({"write": ("step", "metrics"), "close": ("failed",)})


def writer_class(path: str) -> Callable[..., Any]:
    """The class that a recipe names. Raises UserError: it is none, lacks a method, or asks for what nothing fills."""
    found, where = import_attribute(path, KEY), f"{KEY}={path!r}"
    methods = " and ".join(f"`{name}({', '.join(('self', *takes))})`" for name, takes in METHODS.items())
    if not inspect.isclass(found):
        raise UserError(f"{where}: it is {with_article(type(found).__name__)}; wanted is a class with {methods}.")
    for name in METHODS:
        if not callable(getattr(found, name, None)):
            raise UserError(f"{where}: {found.__name__} has no method {name!r}; wanted is a class with {methods}.")
    empty = inspect.Parameter.empty
    unfilled = [name for name, spec in asked_by(found).items() if spec.default is empty and name not in GIVEN]
    if unfilled:
        raise UserError(
            f"{where}: {found.__name__} asks for {', '.join(unfilled)}, which nothing fills. It may ask for {', '.join(GIVEN)}; "
            "give anything else a default."
        )
    return found


def asked_by(found: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a class that can be given by name."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: spec for name, spec in inspect.signature(found).parameters.items() if spec.kind in named}
