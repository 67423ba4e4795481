"""Python packages that cannot be imported here, as their source says they are: names, and parameters of what is called.

Read with `ast` from the wheels that `make setup` keeps in .venv/sources (requirements/sources.txt). Nothing of them runs.
"""

from __future__ import annotations

import ast
import inspect
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PINS = ROOT / "requirements" / "sources.txt"
FOLDER = Path(sys.prefix) / "sources"
DOWNLOAD = "pip download --no-deps --only-binary :all: -d {folder} -r {pins}"


@dataclass(frozen=True)
class Definition:
    """Where a name leads in the end. kind: module, class, function, value (whatever else is assigned), or outside."""

    kind: str
    module: str
    name: str
    node: ast.AST | None = None


class PackageSource:
    """One package's modules, by their names."""

    def __init__(self, distribution: str, package: str) -> None:
        """Raises RuntimeError where `make setup` did not leave the wheel."""
        pin = next(line for line in PINS.read_text().splitlines() if line.startswith(f"{distribution}=="))
        self.package, self.version = package, pin.partition("==")[2].strip()
        wheels = list(FOLDER.glob(f"{distribution.replace('-', '_')}-{self.version}-*.whl"))
        if not wheels:
            raise RuntimeError(
                f"The source of {pin} is not in {FOLDER}. Run `make setup`; where it is up to date and said that it could not "
                f"download it, find an index that has the package, and run: {sys.executable} -m "
                + DOWNLOAD.format(folder=FOLDER, pins=PINS)
            )
        self._wheel = zipfile.ZipFile(wheels[0])
        self._files = {name for name in self._wheel.namelist() if name.startswith(f"{package}/")}

    def file(self, module: str) -> str | None:
        """The module's file in the wheel."""
        base = module.replace(".", "/")
        return next((file for file in (f"{base}/__init__.py", f"{base}.py") if file in self._files), None)

    def is_package(self, module: str) -> bool:
        """Whether the module has modules of its own."""
        return (self.file(module) or "").endswith("__init__.py")

    def find(self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Definition | None:
        """What a name of a module is, through all imports of this package; None where the module has no such name."""
        if (module, name) in seen:
            return None
        seen |= {(module, name)}
        found = self._names(module).get(name)
        if found is None:
            behind = (self.find(star, name, seen) for star in self._stars(module))
            return next((each for each in behind if each is not None), None) or self._submodule(module, name)
        return self._followed(found, seen) if found.kind == "import" else found

    def _followed(self, found: Definition, seen: frozenset[tuple[str, str]]) -> Definition | None:
        """What an import leads to."""
        if found.module.partition(".")[0] != self.package:
            return Definition("outside", found.module, found.name)
        if not found.name:
            return Definition("module", found.module, "")
        return self.find(found.module, found.name, seen) or self._submodule(found.module, found.name)

    def signature(self, definition: Definition, method: str | None = None) -> inspect.Signature | None:
        """Of a function, or of a class's method, which may be a base's; None where no source here has it."""
        node = definition.node
        if isinstance(node, ast.FunctionDef):
            return _signature(node)
        assert isinstance(node, ast.ClassDef), definition
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == method:
                return _signature(part)
        for base in node.bases:
            behind = self.find(definition.module, base.id) if isinstance(base, ast.Name) else None
            if behind is not None and behind.kind == "class" and (found := self.signature(behind, method)):
                return found
        return None

    def mentions(self, definition: Definition, name: str) -> bool:
        """Whether a class sets an attribute of that name, or registers a parameter whose name begins with it."""
        assert definition.node is not None
        for node in ast.walk(definition.node):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == name:
                return True
            if isinstance(node, ast.Constant) and node.value == name:
                return True
        return False

    def _submodule(self, module: str, name: str) -> Definition | None:
        inner = f"{module}.{name}"
        return Definition("module", inner, "") if self.file(inner) else None

    @cached_property
    def _read(self) -> dict[str, tuple[dict[str, Definition], list[str]]]:
        return {}

    def _names(self, module: str) -> dict[str, Definition]:
        return self._module(module)[0]

    def _stars(self, module: str) -> list[str]:
        return self._module(module)[1]

    def _module(self, module: str) -> tuple[dict[str, Definition], list[str]]:
        if module not in self._read:
            file = self.file(module)
            assert file is not None, module
            names: dict[str, Definition] = {}
            stars: list[str] = []
            for node in _statements(ast.parse(self._wheel.read(file))):
                self._take(module, node, names, stars)
            self._read[module] = names, stars
        return self._read[module]

    def _take(self, module: str, node: ast.stmt, names: dict[str, Definition], stars: list[str]) -> None:
        if isinstance(node, ast.ClassDef):
            names[node.name] = Definition("class", module, node.name, node)
        elif isinstance(node, ast.FunctionDef):
            names[node.name] = Definition("function", module, node.name, node)
        elif isinstance(node, ast.ImportFrom):
            source = self._absolute(module, node)
            inside = source.partition(".")[0] == self.package  # what compiled modules export is not known
            stars += [source for alias in node.names if alias.name == "*" and inside]
            for alias in node.names:
                names[alias.asname or alias.name] = Definition("import", source, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.asname is None and "." in alias.name
                target = alias.name.partition(".")[0] if top else alias.name
                names[alias.asname or target] = Definition("import", target, "")
        else:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                if isinstance(target, ast.Name):
                    names[target.id] = Definition("value", module, target.id, node)

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        base = parts[: len(parts) - node.level + self.is_package(module)]
        return ".".join([*base, *([node.module] if node.module else [])])


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """A module's statements, those within `if` and `try` as well: which of them run is not known."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if isinstance(node, ast.If):
            waiting += [*node.body, *node.orelse]
        elif isinstance(node, ast.Try):
            waiting += [*node.body, *(part for handler in node.handlers for part in handler.body), *node.orelse]


def _signature(node: ast.FunctionDef) -> inspect.Signature:
    """Names and kinds of the parameters, and their defaults: None for one that is no literal."""
    taken, kind = node.args, inspect.Parameter
    plain = [*taken.posonlyargs, *taken.args]
    needed = [kind.empty] * (len(plain) - len(taken.defaults))
    defaults = [*needed, *map(_value, taken.defaults)]
    parameters = [
        kind(each.arg, kind.POSITIONAL_OR_KEYWORD, default=default)
        for each, default in zip(plain, defaults, strict=True)
    ]
    if taken.vararg:
        parameters.append(kind(taken.vararg.arg, kind.VAR_POSITIONAL))
    for each, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True):
        parameters.append(kind(each.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else _value(default)))
    if taken.kwarg:
        parameters.append(kind(taken.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
