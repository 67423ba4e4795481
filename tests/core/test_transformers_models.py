"""What transformers knows of its models is what it reads itself, and is read anew when one of the files is another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.core.transformers_models import remembering

KNOWN = """
import json, sys
from contextlib import nullcontext
from megarl.core.loading import as_if_missing
from megarl.core.transformers_models import models_as_remembered
with models_as_remembered() if sys.argv[1] == "remembered" else nullcontext(), as_if_missing("torch"):
    import transformers
    from transformers.utils import import_utils
lists = [
    {name: module for name, module in each._class_to_module.items()} | {"": sorted(each._object_missing_backend)}
    for each in (transformers, transformers.models)
]
print(json.dumps([lists, import_utils.define_import_structure.__module__, import_utils.__spec__.loader.__class__.__name__]))
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as transformers' own, of two models, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "models"
    for name in ("first", "second"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
        (folder / name / f"modeling_{name}.py").write_text(f'__all__ = ["{name.title()}Model", "{name.title()}Head"]\n')
    (folder / "first" / "configuration_first.py").write_text('__all__ = ["FirstConfig"]\n')
    (folder / "__init__.py").touch()
    return folder


def counted(calls: list[str]) -> Callable[..., Any]:
    """transformers' own reader, which remembers nothing, and whose calls are written down."""
    from transformers.utils import import_utils

    def read(path: Any, prefix: str | None = None) -> Any:
        calls.append(str(path))
        import_utils.create_import_structure_from_path.cache_clear()
        return import_utils.define_import_structure.__wrapped__(str(path), prefix)

    return read


def file_of(models: Path) -> Path:
    (path,) = (models.parent / "cache" / "megarl").iterdir()
    return path


def test_it_is_what_the_reader_finds_and_another_process_need_not_read(models: Path) -> None:
    calls: list[str] = []
    read = counted(calls)
    plain, named = read(str(models)), read(str(models / "__init__.py"), "models")
    assert plain[frozenset()] == {"first.configuration_first": {"FirstConfig"}}
    assert plain[frozenset({"torch"})]["second.modeling_second"] == {"SecondModel", "SecondHead"}
    calls.clear()
    for _ in range(2):
        define = remembering(read, models)
        assert define(models) == plain
        assert define(str(models / "__init__.py")) == plain
        assert define(models, prefix="models") == named
    assert calls == [str(models)], "read once, and then remembered"
    inner = models / "first" / "__init__.py"
    assert define(str(inner)) == read(str(inner)), "of other folders it is asked as ever"


def test_what_is_given_out_is_the_askers_own(models: Path) -> None:
    """transformers adds to it."""
    define = remembering(counted([]), models)
    first = define(models)
    first[frozenset()]["first.configuration_first"].add("Another")
    first[frozenset()]["more"] = {"More"}
    assert define(models)[frozenset()] == {"first.configuration_first": {"FirstConfig"}}


def test_a_file_that_changed_or_came_is_read(models: Path) -> None:
    read = counted([])
    remembering(read, models)(models)
    config = models / "first" / "configuration_first.py"
    before = config.stat()
    config.write_text('__all__ = ["OtherConfig"]\n')  # as long as before
    os.utime(config, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert remembering(read, models)(models)[frozenset()] == {"first.configuration_first": {"OtherConfig"}}
    (models / "second" / "configuration_second.py").write_text('__all__ = ["SecondConfig"]\n')
    assert "second.configuration_second" in remembering(read, models)(models)[frozenset()]
    assert remembering(lambda path: pytest.fail("it was remembered"), models)(models) == read(str(models))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"files": 1}', '{"files": "?", "exports": []}', "\udcff", "[" * 9000]
)
def test_a_broken_file_is_made_anew(models: Path, text: str) -> None:
    read = counted([])
    expected = remembering(read, models)(models)
    path = file_of(models)
    whole = path.read_bytes()
    path.write_text(text, errors="surrogateescape")
    assert remembering(read, models)(models) == expected
    assert path.read_bytes() == whole


def test_exports_of_the_wrong_form_are_read_anew(models: Path) -> None:
    read = counted([])
    expected = remembering(read, models)(models)
    said = json.loads(file_of(models).read_text())
    for exports in ([1], [["torch", 1]], [[["torch"], {"first": 1}]], {"torch": 1}):
        file_of(models).write_text(json.dumps(said | {"exports": exports}))
        assert remembering(read, models)(models) == expected


def test_without_a_place_for_it_everything_is_read(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (models.parent / "cache").write_text("a file, and no folder")
    read = counted([])
    assert remembering(read, models)(models) == read(str(models))

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", "no/absolute/path")
    monkeypatch.setattr(Path, "home", homeless)
    assert remembering(read, models)(models) == read(str(models))


def test_the_real_ones_are_known_as_ever(tmp_path: Path) -> None:
    def known(how: str) -> Any:
        command = [sys.executable, "-c", KNOWN, how]
        env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
        return json.loads(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)

    ever, reader, loader = known("ever")
    first, then = known("remembered"), known("remembered")
    assert reader.startswith("transformers") and len(ever[0]) > 2000
    assert first == then == [ever, "megarl.core.transformers_models", loader]
