"""Packages that are imported for their names alone."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.core.stand_in import StandInFinder, StandInModule, standing_in


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package with one module, below another package."""
    inner = tmp_path / "megarl_outer" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "megarl_outer" / "__init__.py").touch()
    (inner / "__init__.py").write_text("real = True")
    (inner / "part.py").write_text("def double(value):\n    return 2 * value")
    monkeypatch.syspath_prepend(tmp_path)
    yield "megarl_outer.inner"
    for name in [name for name in sys.modules if name.startswith("megarl_outer")]:
        del sys.modules[name]


def test_a_finder_answers_for_its_package_alone() -> None:
    finder = StandInFinder("nowhere")
    assert finder.find_spec("nowhere.at.all") is not None
    assert finder.find_spec("nowhere_else") is None


def test_names_of_a_stand_in_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.meta_path", [StandInFinder("nowhere")])
    spec = importlib.util.find_spec("nowhere")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    assert isinstance(module, StandInModule)
    assert issubclass(module.OutOfResources, Exception)

    def kernel() -> None:
        pass

    assert module.jit(kernel) is kernel
    assert module.autotune(configs=[])(kernel) is kernel
    with pytest.raises(AttributeError):
        assert module.__wrapped__


def test_what_stands_in_is_gone_afterwards(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    finders = list(sys.meta_path)
    with standing_in((package,)):
        inner, part = importlib.import_module(package), importlib.import_module(f"{package}.part")
        assert isinstance(inner, StandInModule) and isinstance(part, StandInModule)
        monkeypatch.setitem(sys.modules, "megarl_other_name", part)
        assert part.double(len) is len and sys.modules["megarl_outer"].inner is inner
        assert not isinstance("text", inner.Kind)
    assert sys.meta_path == finders and "megarl_other_name" not in sys.modules
    assert not hasattr(sys.modules["megarl_outer"], "inner")
    real = importlib.import_module(f"{package}.part")
    assert real.double(4) == 8 and importlib.import_module(package).real
    assert sys.modules["megarl_outer"].inner is importlib.import_module(package)


def test_what_was_loaded_before_stays(package: str) -> None:
    loaded = importlib.import_module(package)
    with standing_in((package,)):
        assert importlib.import_module(package) is loaded
        assert importlib.import_module(f"{package}.part").double(4) == 8
    assert sys.modules[package] is loaded and sys.modules["megarl_outer"].inner is loaded
