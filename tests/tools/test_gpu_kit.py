"""The kit's pure parts: a file cut and joined, wheels chosen from a lock, and where a wheel's files belong."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.gpu_engine import FIGURES
from megarl.core.versions import installed
from tests.support.platforms import MODULES, ON_DEVICES
from tools.gpu_kit.__main__ import main
from tools.gpu_kit.make import loosened, project_files, write_program
from tools.gpu_kit.parts import HEAD_BYTES, Head, KitError, join, split
from tools.gpu_kit.use import Check, Module, install, place_of, unpack, use_kit
from tools.gpu_kit.wheels import chosen, download_words, read_lock

ROOT = Path(__file__).parents[2]
LOCK = """# Compiled
engine==1.2.post1
    # via -r cpu.in
numpy==2.3.5
    # via
    #   -r cpu.in
    #   engine
    #   torch
only-torchs==4.0
    # via torch
tiny==0.1
    # via numpy
torch==2.13.0
    # via engine
"""


def cut(folder: Path, content: bytes, part_bytes: int) -> list[Path]:
    whole = folder / "whole"
    whole.write_bytes(content)
    return split(whole, folder, part_bytes)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(content=st.binary(max_size=400), room=st.integers(1, 150), order=st.randoms())
def test_parts_are_no_larger_than_asked_and_give_the_whole(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, room: int, order: object
) -> None:
    folder = tmp_path_factory.mktemp("kit")
    parts = cut(folder, content, HEAD_BYTES + room)
    assert len(parts) == max(1, -(-len(content) // room))
    assert all(part.stat().st_size <= HEAD_BYTES + room for part in parts)
    order.shuffle(parts)  # type: ignore[attr-defined]
    kit = join(parts, folder / "again")
    assert (folder / "again").read_bytes() == content
    assert kit == Head.read(parts[0]).kit


def test_parts_that_are_missing_damaged_or_of_another_kit_are_told_of(tmp_path: Path) -> None:
    target, other = tmp_path / "again", tmp_path / "other"
    other.mkdir()
    parts = cut(tmp_path, b"0123456789" * 10, HEAD_BYTES + 40)
    with pytest.raises(KitError, match="Of 3 parts these are missing: part-00, part-02"):
        join(parts[1:2], target)
    with pytest.raises(KitError, match="of 2 different kits"):
        join([*parts, *cut(other, b"x", HEAD_BYTES + 1)], target)
    with pytest.raises(KitError, match=r"part-01 is damaged.*again"):
        parts[1].write_bytes(parts[1].read_bytes()[:-1] + b"!")
        join([tmp_path], target)
    with pytest.raises(KitError, match="whole is no part of a kit"):
        join([tmp_path / "whole"], target)
    with pytest.raises(KitError, match="No part of a kit was given"):
        join([target.parent / "nothing"] if (target.parent / "nothing").mkdir() is None else [], target)
    with pytest.raises(KitError, match=f"more than {HEAD_BYTES} bytes"):
        split(tmp_path / "whole", tmp_path, HEAD_BYTES)


def test_what_is_wanted_comes_with_what_it_needs_and_without_what_torch_brings() -> None:
    lock = read_lock(LOCK)
    assert lock.versions["engine"] == "1.2.post1" and lock.needs["engine"] == {"numpy", "torch"}
    assert chosen(lock, ["engine"], ["torch"]) == {"engine": "1.2.post1", "numpy": "2.3.5", "tiny": "0.1"}
    with pytest.raises(KitError, match="no other: compile it anew"):
        chosen(lock, ["engine", "other"], ["torch"])


def test_the_lock_has_all_that_the_kit_wants_and_neither_torch_nor_its_cuda() -> None:
    pins = chosen(read_lock((ROOT / "requirements" / "cpu.lock").read_text()))
    assert {"transformers", "tokenizers", "numpy", "megatron-core", "pydantic-core", "pluggy"} <= pins.keys()
    assert not {"torch", "sympy", "networkx", "ray", "sglang"} & pins.keys()


def imported(file: Path) -> set[str]:
    """Top packages that a file imports, wherever it does."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


def test_what_is_checked_imports_nothing_that_the_kit_has_not() -> None:
    """But for what a machine may lack, whose tests are left out there."""
    rooms = [ROOT / "megarl" / room for room in ("core", "models", "training", "sync")]
    rooms += [ROOT / "tests" / room for room in ("models", "training", "sync", "gpu")]
    names = set().union(*(imported(file) for room in rooms for file in room.rglob("*.py")))
    names -= {*sys.stdlib_module_names, "megarl", "tests", "tools", "bench", "torch"}
    names -= {
        "setuptools",
        "transformer_engine",
    }  # the one comes with torch, and the other is the machine's or is not there
    names -= {module for modules in (*MODULES.values(), *ON_DEVICES.values()) for module in modules}
    wheels = chosen(read_lock((ROOT / "requirements" / "cpu.lock").read_text())).keys()
    known = packages_distributions()
    lacking = {name for name in names if not wheels & {each.lower().replace("_", "-") for each in known.get(name, ())}}
    assert not lacking


def test_pip_is_asked_for_wheels_of_that_python_and_for_nothing_that_they_name() -> None:
    words = download_words({"a": "1"}, "3.12", "folder")
    assert words[-1] == "a==1" and {"--no-deps", "--only-binary=:all:"} <= set(words)
    assert words[words.index("--python-version") + 1] == "3.12"


def test_files_of_a_wheel_lie_where_python_finds_them_and_never_before_torch(tmp_path: Path) -> None:
    assert place_of("numpy/core.py") == "numpy/core.py"
    assert place_of("x-1.0.data/platlib/x/y.so") == "x/y.so"
    assert place_of("x-1.0.data/scripts/run") is None
    for name, content in (("good", {"good/a.py": "1", "good-1.data/scripts/b": "2"}), ("bad", {"torch/a.py": "3"})):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as wheel:
            for path, text in content.items():
                wheel.writestr(path, text)
    site = tmp_path / "site"
    install(tmp_path / "good.whl", site)
    assert [str(file.relative_to(site)) for file in site.rglob("*") if file.is_file()] == ["good/a.py"]
    with pytest.raises(KitError, match=r"bad.whl holds torch/a.py, which would stand before"):
        install(tmp_path / "bad.whl", site)


def test_a_wheel_travels_loose_within_a_kit_that_is_compressed_as_a_whole(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("a/__init__.py", "1\n" * 5000)
        wheel.writestr("a/data/", "")
    loose = loosened(tmp_path / "a.whl", tmp_path)
    assert loose.stat().st_size > 10_000 > 10 * (tmp_path / "a.whl").stat().st_size
    install(loose, tmp_path / "site")
    assert (tmp_path / "site" / "a" / "__init__.py").read_text() == "1\n" * 5000


@pytest.mark.parametrize("kind", ["gz", "xz"])
@pytest.mark.parametrize("filters", [True, False])
def test_a_kit_is_unpacked_once(filters: bool, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package called `tests` among the machine's own does not stand before the project's.

    filters: without them, as in Python before 3.11.4, which Debian 12 has.
    """
    if not filters:
        whole = tarfile.TarFile.extractall
        monkeypatch.delattr(tarfile, "data_filter")
        monkeypatch.setattr(tarfile.TarFile, "extractall", lambda self, path: whole(self, path))
    made, folder = tmp_path / "made", tmp_path / "there"
    (made / "wheels").mkdir(parents=True)
    with zipfile.ZipFile(made / "wheels" / "good.whl", "w") as wheel:
        wheel.writestr("good/a.py", "1")
    (made / "project" / "tests").mkdir(parents=True)
    (made / "project" / "tests" / "conftest.py").touch()
    (made / "kit.json").write_text('{"python": "3.12", "torch": "2.11"}')
    with tarfile.open(tmp_path / "kit.tar", f"w:{kind}") as tar:  # type: ignore[call-overload]
        tar.add(made, ".")
    parts = split(tmp_path / "kit.tar", tmp_path, HEAD_BYTES + 100)
    assert len(parts) > 1
    for _ in range(2):
        assert unpack([tmp_path], folder) == {"python": "3.12", "torch": "2.11"}
        assert (folder / "site" / "good" / "a.py").read_text() == "1"
        assert (folder / "project" / "tests" / "__init__.py").exists()
        (folder / "site" / "mine").touch()
    assert (folder / "site" / "mine").exists(), "the second time it is taken as it is"


def test_a_python_without_lzma_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(tmp_path, b"x", HEAD_BYTES + 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(KitError, match=r"was built without lzma.*name another Python"):
        unpack([tmp_path / "part-00"], tmp_path / "there")


def test_what_was_unpacked_nowhere_in_particular_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "part-00").write_bytes(b"no part")
    with pytest.raises(KitError, match="is no part of a kit"):
        use_kit([tmp_path / "part-00"], Check("cpu", 1.0), None, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["part-00"]


def test_a_module_of_the_unpacked_kit_is_run_in_the_folder_of_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The bench's first cell, with this machine's packages in place of wheels; all paths are relative."""
    torch = installed("torch")
    monkeypatch.setattr("tools.gpu_kit.use.torch_version", lambda: torch)
    facts = {"python": f"{sys.version_info.major}.{sys.version_info.minor}", "torch": torch}
    (tmp_path / "kit.json").write_text(json.dumps(facts))
    with tarfile.open(tmp_path / "kit.tar.gz", "w:gz", compresslevel=1) as tar:
        tar.add(tmp_path / "kit.json", "kit.json")
        for file in project_files():
            if file.startswith(("megarl/", "bench/", "tests/training/")):
                tar.add(ROOT / file, f"project/{file}")
    split(tmp_path / "kit.tar.gz", tmp_path, 10**9)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "shown.py").write_text("import bench, os; print(bench.__file__, os.getcwd())")
    use = ["use", "part-00", "--into", "there", "--out", "results", "--run"]
    assert main([*use, "shown"]) == 0
    package, folder = capfd.readouterr().out.splitlines()[-1].split()
    assert Path(package) == tmp_path / "there" / "project" / "bench" / "__init__.py"
    assert Path(folder) == tmp_path / "results"
    words = ["bench.gpu_engine", "--platform", "cpu", "--shapes", "tiny", "--cell", '{"kind": "peak"}']
    assert main([*use, *words]) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith(FIGURES)]
    assert json.loads(lines[-1].removeprefix(FIGURES))["matmul_flops_s"] > 0


def test_the_check_has_the_minutes_that_unpacking_left(tmp_path: Path) -> None:
    words = ["tools.gpu_check", "--platform", "cuda", "--minutes", "6.50", "--out", str(tmp_path)]
    assert Check("cuda", 7.0).words(30.0, tmp_path) == words
    assert Check("cuda", 7.0, go_on=True).words(30.0, tmp_path) == [*words, "--go-on"]
    assert Module(("a", "--out", "b")).words(30.0, tmp_path) == ["a", "--out", "b"]


def test_the_program_runs_alone_and_says_what_is_wrong(tmp_path: Path) -> None:
    """In a Python without packages, of this or another version."""
    write_program(tmp_path / "gpu_kit", tmp_path / "program")
    command = [sys.executable, "-I", "-S", "gpu_kit", "use", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "No part of a kit was given" in done.stderr or "has no torch that loads" in done.stderr


def test_a_kit_is_not_written_over_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "part-00").touch()
    assert main(["make", "--out", str(tmp_path)]) == 2
    assert "holds a kit already (part-00, ...)" in capsys.readouterr().err


def test_the_kit_takes_the_project_as_git_has_it() -> None:
    files = project_files()
    assert {"tools/gpu_check.py", "tests/conftest.py", "megarl/training/rank.py", "pyproject.toml"} <= set(files)
