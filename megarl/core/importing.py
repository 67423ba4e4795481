"""Functions that a recipe names by import path: found in the user's own folder, refused in words where they are not."""

from __future__ import annotations

import importlib
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

from megarl.core.errors import UserError
from megarl.core.words import did_you_mean

OURS = Path(__file__).parent.parent
# Python's own modules, and what is installed beside them.
INSTALLERS = {"site-packages", "dist-packages"}
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def import_attribute(path: str, key: str, folder: Path | None = None) -> Any:
    """What `pkg.module:name` names. key: the recipe's key that says so, such as `reward.fn`; named in errors.

    folder: where the user's modules are looked for first; default: the current folder.
    Raises UserError: a module that does not import (with the reason), a missing attribute (with the nearest).
    """
    where = f"{key}={path!r}"
    module_name, _, attribute = path.partition(":")
    with importable(folder or Path.cwd()):
        module = _import(where, module_name)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            hint = did_you_mean(part, [name for name in dir(found) if not name.startswith("_")], quoted=True)
            raise UserError(f"{where}: {_lacks(module, attribute)}.{hint}")
        found = getattr(found, part)
    return found


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """A folder at the front of the import path, as `python -m` has it; command-line scripts do not."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        if entry in sys.path:  # the user's module may have changed the path too
            sys.path.remove(entry)


def _import(where: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything while it loads
        if "/" in module_name or module_name.endswith(".py"):
            raise UserError(
                f"{where}: {module_name!r} is a file's path, and a module is named as Python imports it: "
                f"{_as_imported(module_name)!r}, from the folder that megarl is started in."
            ) from error
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (module_name == missing or module_name.startswith(f"{missing}.")):
            raise UserError(
                f"{where}: there is no module {missing!r} in the current folder ({Path.cwd()}) or in the "
                "installed packages. Correct the path, or start megarl from the folder that holds the module."
            ) from error
        raise UserError(
            f"{where}: the module {module_name!r} does not import: {type(error).__name__}: {error}"
            f"{raised_at(error)}. Mend the module, or install what it needs."
        ) from error


def _lacks(module: ModuleType, attribute: str) -> str:
    """What a module, or a folder that was named in the place of one, does not have, as a sentence without its end."""
    if file := getattr(module, "__file__", None):
        return f"{file} has no {attribute!r}"
    folders = [Path(each) for each in getattr(module, "__path__", ())]
    if not folders:
        return f"the module {module.__name__!r}, which is Python's own, has no {attribute!r}"
    files = sorted(path.stem for folder in folders for path in folder.glob("*.py"))
    files = [name for name in files if not name.startswith("_")]
    if not files:
        return f"{module.__name__!r} is a folder without a Python file, {folders[0]}. Name the module that has {attribute!r}"
    return f"{module.__name__!r} is a folder, {folders[0]}. Name a file in it, such as '{module.__name__}.{files[0]}:{attribute}'"


def raised_at(error: BaseException) -> str:
    """` (FILE, line N)`: where an error came from in the user's code; in a package's where none of it is the user's."""
    if isinstance(error, SyntaxError):
        return ""  # its text has the line
    passed = [(Path(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    passed = [each for each in passed if each[0].is_absolute() and not each[0].is_relative_to(OURS)]
    own = [
        each
        for each in passed
        if not any(each[0].is_relative_to(path) for path in INSTALLED) and not INSTALLERS & {*each[0].parts}
    ]
    if not passed:
        return ""
    file, line = (own or passed)[-1]
    try:
        here = Path.cwd()
    except OSError:  # the function has removed the folder that it had gone into
        return f" ({file}, line {line})"
    return f" ({file.relative_to(here) if own and file.is_relative_to(here) else file}, line {line})"


def _as_imported(path: str) -> str:
    """The name of a module that somebody has named by its file."""
    file = PurePath(path.removesuffix(".py"))
    return file.name if file.is_absolute() or ".." in file.parts else ".".join(file.parts)
