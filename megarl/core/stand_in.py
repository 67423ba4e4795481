"""Stand-ins for packages that are imported for their names alone: each name resolves, and nothing is computed.

Large libraries import others for decorators, annotations and `isinstance`, where what those do is never asked for.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class StandInModule(ModuleType):
    """A module in which every name resolves: capitalised ones to classes, others to callable modules."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any
        if name[0].isupper():
            # Some are raised and caught, others are subclassed: an exception class serves for both.
            value = type(name, (Exception,), {"__module__": self.__name__})
        else:
            value = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *values: Any, **options: Any) -> Any:
        """As a decorator, with or without options: gives the function back unchanged."""
        if len(values) == 1 and callable(values[0]) and not options:
            return values[0]
        return _unchanged

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _unchanged(value: Any) -> Any:
    return value


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers the import of one package and of everything below it with stand-ins."""

    def __init__(self, package: str, prepare: Callable[[ModuleType], None] | None = None) -> None:
        """prepare: gives a module the few names that must be real."""
        self._package = package
        self._prepare = prepare

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for the package's own names; None for all others."""
        if fullname != self._package and not fullname.startswith(f"{self._package}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """An empty stand-in."""
        return StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Give the module the few names that must be real."""
        if self._prepare is not None:
            self._prepare(module)


@contextmanager
def standing_in(packages: Sequence[str]) -> Iterator[None]:
    """Within, these packages are stand-ins where nobody has loaded them; who imports them afterwards gets the packages."""
    finders = {name: StandInFinder(name) for name in packages if name not in sys.modules}
    sys.meta_path[:0] = finders.values()
    try:
        yield
    finally:
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in finders.values()]
        made = [(name, module) for name, module in sys.modules.items() if isinstance(module, StandInModule)]
        for name, module in made:  # by their own names: packages have others for their modules
            if any(f"{module.__name__}.".startswith(f"{package}.") for package in finders):
                del sys.modules[name]
        for package in finders:
            parent, _, child = package.rpartition(".")
            vars(sys.modules.get(parent, ModuleType(parent))).pop(child, None)  # as an import has set it
