"""Stands in for opencensus on the path of a test's Ray: its dashboard asks for it on start, for metrics that nobody reads.

Every submodule can be imported, and has every class.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Class(type):
    """A class whose instances are made with anything; both have every attribute."""

    def __getattr__(cls, name: str) -> type:
        return _Class._made(name)

    @staticmethod
    def _made(name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        body = {"__init__": lambda self, *args, **options: None, "__getattr__": lambda self, each: _Class._made(each)}
        return _Class(name, (), body)


class _Anything(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{__name__}.") else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _Class._made  # type: ignore[method-assign]


sys.meta_path.append(_Anything())
