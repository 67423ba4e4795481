"""Garbage is not looked for while something loads; a package can be as if it were missing."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import pytest

from megarl.core.loading import as_if_missing, distributions_as_asked, without_collection


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


def test_distributions_are_those_that_a_whole_reading_finds() -> None:
    """PyYAML's package has another name than the distribution; that of numpy has not."""
    whole = importlib.metadata.packages_distributions()
    with distributions_as_asked():
        found = importlib.metadata.packages_distributions()
        assert found["numpy"] == whole["numpy"] and dict(found) == {"numpy": ["numpy"]}
        assert found["yaml"] == whole["yaml"] == ["PyYAML"] and found.get("yaml", []) == ["PyYAML"]
        assert found.get("no_such_package", []) == [] and found.get("no_such_package") is None
        with pytest.raises(KeyError, match="no_such_package"):
            found["no_such_package"]
    assert importlib.metadata.packages_distributions() == whole


def test_a_whole_reading_is_what_it_was_also_where_the_import_fails() -> None:
    before = importlib.metadata.packages_distributions
    with pytest.raises(ImportError), distributions_as_asked():
        raise ImportError
    assert importlib.metadata.packages_distributions is before
