"""Reads the package's own source as syntax trees, for the tests beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import megarl

PACKAGE = Path(megarl.__file__).parent


@dataclass(frozen=True)
class Import:
    """One import statement's target; `deferred` where it stands inside a function or under TYPE_CHECKING."""

    module: str
    line: int
    deferred: bool


@cache
def modules() -> dict[str, ast.Module]:
    """Dotted name to syntax tree of every module of the package."""
    return {name_of(path): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def name_of(path: Path) -> str:
    """`megarl.recipe.load`; a package's `__init__` has the package's name."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """`recipe` for megarl.recipe.load, `train` for megarl.train."""
    return module.split(".")[1] if "." in module else ""


@cache
def imports(tree: ast.Module) -> tuple[Import, ...]:
    """Every import, those inside functions included; `from a import b` counts as a.b, which may be a module."""
    return tuple(_imports(tree, deferred=False))


def _imports(node: ast.AST, *, deferred: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, deferred)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: imports are absolute"
            for alias in child.names:
                yield Import(f"{child.module}.{alias.name}", child.lineno, deferred)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            )
            yield from _imports(child, deferred=deferred or inside)
