"""Loads large libraries, without what nobody needs of them. Not for finding what a recipe names (importing.py)."""

from __future__ import annotations

import gc
import importlib.metadata
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_collection() -> Iterator[None]:
    """Nothing that an import makes is garbage: not to look for any saves up to a quarter of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def as_if_missing(package: str) -> Iterator[None]:
    """What is imported within finds that the package is not installed, unless this process has loaded it already."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # how Python writes down that there is none
    try:
        yield
    finally:
        del sys.modules[package]


@contextmanager
def distributions_as_asked() -> Iterator[None]:
    """Within, `importlib.metadata.packages_distributions` gives a mapping that looks a package up when it is asked for it.

    transformers calls it as it loads, which reads the records of all that is installed, and looks up few packages or none.
    """
    at_once = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = _AsAsked
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = at_once


class _AsAsked(dict[str, list[str]]):
    """Names of distributions by package. Where none has the package's own name, all are read after all."""

    _all = staticmethod(importlib.metadata.packages_distributions)

    def __missing__(self, package: str) -> list[str]:
        try:
            self[package] = [importlib.metadata.distribution(package).name]
        except importlib.metadata.PackageNotFoundError:
            self.update(self._all())
        if package not in self:
            raise KeyError(package)
        return self[package]

    def get(self, package: str, default: Any = None) -> Any:
        """As of a dict, whether it was asked for before or not."""
        try:
            return self[package]
        except KeyError:
            return default
