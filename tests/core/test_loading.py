"""Garbage is not looked for while something loads; a package can be as if it were missing."""

from __future__ import annotations

import gc
import importlib.util
import sys
from pathlib import Path

import pytest

from megarl.core.loading import as_if_missing, without_collection


def test_collection_is_off_inside_and_as_before_after_it() -> None:
    assert gc.isenabled()
    with without_collection():
        assert not gc.isenabled()
        with without_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collection_goes_on_where_the_import_fails() -> None:
    with pytest.raises(ImportError), without_collection():
        raise ImportError
    assert gc.isenabled()


def test_a_package_is_missing_inside_and_there_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there_for_a_test.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with as_if_missing("there_for_a_test"):
        assert importlib.util.find_spec("there_for_a_test") is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("there_for_a_test")
    found = importlib.import_module("there_for_a_test")
    with as_if_missing("there_for_a_test"):
        assert importlib.import_module("there_for_a_test") is found, "who has loaded it keeps it"
    assert sys.modules.pop("there_for_a_test") is found
