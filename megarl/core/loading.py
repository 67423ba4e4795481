"""Loads large libraries, without what nobody needs of them. Not for finding what a recipe names (importing.py)."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


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
