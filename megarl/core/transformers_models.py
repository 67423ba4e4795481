"""Remembers what transformers reads from its own files whenever it is imported. Written for transformers 5.12.1.

To know what its models export, transformers reads its 1,500 files of them at each import, and once more when its package of
models is first asked: up to a second of a core, in every process that has a tokenizer. The answer stays the same between
installations. Here it is kept in a file of the user's cache, and holds as long as each of those files has the size and the
time that it had.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from megarl.core.loading import as_if_missing, distributions_as_asked, without_collection

READER = "transformers.utils.import_utils"  # the module that reads the files

# What has to be installed for them -> module -> the names that it exports.
Exports = dict[frozenset[str], dict[str, set[str]]]

log = logging.getLogger(__name__)


@contextmanager
def without_models() -> Iterator[None]:
    """Within, transformers is loaded for its tokenizers and configs alone, unless this process has loaded torch.

    Where it finds torch, it loads it, and all that generates text: seconds, and hundreds of megabytes in every process that reads
    rows. A process that had not loaded torch before has no models of transformers after it.
    """
    told = "TRANSFORMERS_NO_ADVISORY_WARNINGS"  # that there are no models then
    before = os.environ.get(told)
    os.environ[told] = "1"
    try:
        with without_collection(), distributions_as_asked(), models_as_remembered(), as_if_missing("torch"):
            yield
    finally:
        if before is None:
            del os.environ[told]
        else:
            os.environ[told] = before


@contextmanager
def models_as_remembered() -> Iterator[None]:
    """Within, transformers learns from the file what its models export, and writes it where it is not there or not true."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds the module as ever, and has its function replaced as soon as it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != READER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader  # who asks afterwards meets nobody new
        self._loader.exec_module(module)
        read = getattr(module, "define_import_structure", None)  # a release that has none is imported as it is
        if read is not None:
            models = Path(str(module.__file__)).parents[1] / "models"
            module.define_import_structure = remembering(read, models)  # type: ignore[attr-defined]


def remembering(read: Callable[..., Exports], models: Path) -> Callable[..., Exports]:
    """transformers' `define_import_structure`, which reads the files of this one folder only where they are not as remembered.

    read: the function. It is given the folder, or the `__init__.py` in it, and a prefix for the modules' names.
    """
    known: list[Exports] = []

    def define(module_path: Any, prefix: str | None = None) -> Exports:
        if Path(module_path) not in (models, models / "__init__.py"):
            return read(module_path, prefix)
        if not known:
            known.append(_remembered(lambda: read(str(models)), models))
        before = "" if prefix is None else f"{prefix}."
        return {
            needs: {before + name: set(exports) for name, exports in modules.items()}
            for needs, modules in known[0].items()
        }

    return define


def _remembered(read: Callable[[], Exports], models: Path) -> Exports:
    try:
        files, path = _files(models), _file_of(models)
        text = path.read_bytes() if path.exists() else b""
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody knows where this user is at home
        log.debug("what transformers' models export is not remembered: %s", error)
        return read()
    found = _exports(text, files)
    if found is None:
        found = read()
        _write(path, files, found)
    return found


def _file_of(models: Path) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # as good as none, says the specification of these variables
        cache = Path.home() / ".cache"
    name = hashlib.blake2b(str(models).encode(), digest_size=8).hexdigest()
    return cache / "megarl" / f"transformers_models_{name}.json"


def _files(models: Path) -> str:
    """A digest of all files of Python below a folder: their names, sizes and times."""
    found = []
    for folder, _, names in os.walk(models):
        for name in names:
            if name.endswith(".py"):
                facts = os.stat(os.path.join(folder, name))
                found.append(f"{folder}/{name} {facts.st_size} {facts.st_mtime_ns}")
    return hashlib.blake2b("\n".join(sorted(found)).encode(), digest_size=16).hexdigest()


def _exports(text: bytes, files: str) -> Exports | None:
    """What a file says, where it is whole and of these files."""
    try:
        said = json.loads(text)
        if said["files"] != files:
            return None
        return {
            frozenset(needs): {name: set(exports) for name, exports in modules.items()}
            for needs, modules in said["exports"]
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _write(path: Path, files: str, exports: Exports) -> None:
    said = {
        "files": files,
        "exports": [
            [sorted(needs), {name: sorted(each) for name, each in modules.items()}]
            for needs, modules in exports.items()
        ],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", encoding="utf-8", delete=False) as file:
            file.write(json.dumps(said))
        os.replace(file.name, path)  # processes that start together each write a whole one
    except OSError as error:
        log.debug("what transformers' models export is not remembered: %s", error)
