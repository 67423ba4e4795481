"""Without a GPU it refuses; with absent parts it says which, and does not try what cannot work without them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.training import test_pretend_device, test_rank
from tools import gpu_check

ROOT = Path(__file__).parents[2]


def test_without_a_gpu_it_refuses_with_exit_code_2() -> None:
    done = subprocess.run(
        ["make", "gpu-check", f"GPU_PYTHON={sys.executable}"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "needs an NVIDIA GPU" in done.stdout


def test_a_part_that_does_not_load_is_absent_and_its_cost_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"there": ("print(1.5)", "x"), "gone": ("import no_such_module", "no rollout")}
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    there, gone = (gpu_check.look_at_part(name) for name in parts)
    assert (there.verdict, there.detail) == ("works", "1.5")
    assert gone.verdict == "absent" and "No module named 'no_such_module'; no rollout" in gone.detail


@pytest.mark.parametrize(("wait", "status"), [("", 0), ("; sleep 60", -1)])
def test_what_a_check_has_started_ends_with_it(tmp_path: Path, wait: str, status: int) -> None:
    """As ranks do not whose test hangs, or is ended by a signal."""
    command = ["sh", "-c", f"setsid sleep 60 > /dev/null 2>&1 & echo $!{wait}"]
    ended, said = gpu_check.run_logged(command, 0.2, tmp_path / "log", {})
    line = Path("/proc", said.split()[0], "cmdline")  # empty of one that has ended and that nobody has asked how
    assert ended == status and not (line.exists() and line.read_bytes())


def test_what_needs_an_absent_part_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine with a CPU's torch and no kernels."""

    def absent(name: str) -> gpu_check.Row:
        return gpu_check.Row(name, "works" if name == "Transformer Engine" else "absent", "")

    monkeypatch.setattr(gpu_check, "look_at_part", absent)
    rows = list(gpu_check.check(gpu_check.Place("cuda", time.time() + 60, tmp_path)))
    assert [row.what for row in rows[: len(gpu_check.PARTS)]] == list(gpu_check.PARTS)
    *checks, end_to_end = rows[len(gpu_check.PARTS) :]
    assert {(row.verdict, row.detail) for row in checks} == {("not run", "needs torch.cuda")}
    assert len(checks) == len(gpu_check.CHECKS)
    assert (end_to_end.verdict, end_to_end.detail) == ("not run", "needs torch.cuda and SGLang's kernels and Ray")
    assert not gpu_check.well(rows), "nothing was checked"


def test_a_row_counts_tests_and_says_what_the_machine_lacks() -> None:
    def line(outcome: str, why: str = "") -> dict[str, str]:
        return {"test": "tests/x.py::a", "outcome": outcome, "why": why}

    lines = [line("passed"), line("passed"), line("lacking", "needs 2 devices"), line("lacking", "needs 2 devices")]
    row = gpu_check.summed_up("x", lines, 0, "", 1.5)
    assert (row.verdict, row.detail) == ("works", "2 passed; 2 not tried: needs 2 devices")
    assert gpu_check.summed_up("x", lines[2:], 0, "", 0.0).verdict == "not run"
    row = gpu_check.summed_up("x", [*lines, line("failed", "a != b")], 1, "", 0.0)
    assert row.verdict == "failed" and row.detail.startswith("1 failed, the first tests/x.py::a: a != b; 2 passed")
    row = gpu_check.summed_up("x", [*lines, line("begun", "the process ended within it")], -6, "", 0.0)
    assert row.verdict == "failed" and "1 failed, the first tests/x.py::a: the process ended within it" in row.detail
    row = gpu_check.summed_up("x", lines, -1, "Fatal Python error", 0.0)
    assert row.verdict == "failed" and "pytest ended with -1: Fatal Python error" in row.detail


def test_only_what_failed_or_came_too_late_makes_a_check_fail() -> None:
    absent, lacking = gpu_check.Row("Ray", "absent", ""), gpu_check.Row("x", "not run", "4 not tried: needs Ray")
    assert gpu_check.well([absent, lacking, gpu_check.Row("y", "works", "")])
    assert not gpu_check.well([absent, lacking, gpu_check.Row("transformers", "works", "")])
    assert not gpu_check.well([gpu_check.Row("torch.cuda", "absent", ""), gpu_check.Row("y", "works", "")])
    assert not gpu_check.well([gpu_check.Row("y", "failed", "")])
    assert not gpu_check.well([gpu_check.Row("y", "not run", "no time was left")])
    assert not gpu_check.well([gpu_check.Row("y", "works", "3 passed; 2 not tried: no time was left")])


@pytest.mark.parametrize(
    "test",
    [
        test_rank.test_a_rank_loads_megatron_without_what_it_does_not_use,
        test_pretend_device.test_the_engine_keeps_to_its_device,
    ],
)
def test_what_adapts_megatron_to_a_cpu_is_not_run_on_a_device(test: Callable[..., None]) -> None:
    """There the adapter refuses: torch sees a device."""
    assert "host_only" in {mark.name for mark in test.pytestmark}  # type: ignore[attr-defined]


def test_transformers_is_asked_for_a_name_that_it_has_to_load() -> None:
    """`import transformers` alone succeeds where none of its models can be imported."""
    code = gpu_check.PARTS["transformers"][0]
    blocked = f"import sys; sys.modules['transformers.models.auto'] = None; {code}"
    assert subprocess.run([sys.executable, "-c", blocked], capture_output=True).returncode == 1


TESTS = """
import os
import pytest

def test_passes(platform):
    assert platform.name == "cpu"

def test_fails():
    assert 1 == 2, "one is not two"

@pytest.mark.needs("Ray")
def test_needs_a_package():
    raise AssertionError("never run")

def test_breaks_the_device():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_ends_the_process():
    os._exit(3)

def test_comes_behind_it():
    pass
"""


def test_every_test_is_a_line_and_none_is_run_twice(tmp_path: Path) -> None:
    """A file that asks for a package that is not there is a line as well; a process of no more use is told by its exit."""
    files = [tmp_path / "test_made.py", tmp_path / "test_made_without.py"]
    files[0].write_text(TESTS)
    files[1].write_text("import sglang.no_such_thing\n")
    results = tmp_path / "results.jsonl"
    hidden = "import sys; sys.modules.update(ray=None, sglang=None); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-p", "tests.conftest", "-c", "pyproject.toml", "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    command = [sys.executable, "-c", hidden, "-q", *options, "--results", str(results), "--may-lack", *map(str, files)]
    done = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True) for _ in range(4)]
    found = gpu_check.outcomes(results)
    assert {name.rpartition("/")[2]: line["outcome"] for name, line in found.items()} == {
        "test_made.py::test_passes": "passed",
        "test_made.py::test_fails": "failed",
        "test_made.py::test_needs_a_package": "lacking",
        "test_made.py::test_breaks_the_device": "failed",
        "test_made.py::test_ends_the_process": "begun",
        "test_made.py::test_comes_behind_it": "passed",
        "test_made_without.py": "lacking",
    }, done[0].stdout
    reasons = {name.rpartition(":")[2].rpartition("/")[2]: line["why"] for name, line in found.items()}
    assert "one is not two" in reasons["test_fails"] and reasons["test_made_without.py"] == "needs SGLang"
    # Ended by the broken device, by the test that ends its process, by nothing; and then nothing is left.
    assert [each.returncode for each in done] == [2, 3, 0, gpu_check.NOTHING_LEFT], [each.stdout for each in done]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gpu_check.Place:
    """With a minute's time, and the environment that a check is made in."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return gpu_check.Place("cpu", time.time() + 60, tmp_path)


def made_check(folder: Path, **files: str) -> gpu_check.Check:
    """Of test files of these names, which are outside the project."""
    folder.mkdir()
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    options = ("-p", "tests.conftest", "-c", "pyproject.toml", "--rootdir", str(folder))
    return gpu_check.Check("made", (*options, str(folder)))


def lines_of(place: gpu_check.Place) -> dict[str, str]:
    """The outcome of each test, by its name without the folder."""
    return {name.rpartition("/")[2]: line["outcome"] for name, line in gpu_check.outcomes(place.tests).items()}


def test_a_file_that_does_not_import_costs_itself_alone(tmp_path: Path, place: gpu_check.Place) -> None:
    check = made_check(tmp_path / "made", broken="import no_such_module", good="def test_passes(): pass")
    row = gpu_check.run_check(check, place)
    assert lines_of(place) == {"test_broken.py": "failed", "test_good.py::test_passes": "passed"}
    assert row.verdict == "failed" and "No module named 'no_such_module'" in row.detail and "1 passed" in row.detail


LEFT = """
from pathlib import Path

def test_one():
    ran("one")

def test_two():
    ran("two")

def ran(name):
    with open(Path(__file__).with_name("ran"), "a") as file:
        file.write(name + " ")
"""


def test_a_second_call_tries_exactly_what_was_late(tmp_path: Path, place: gpu_check.Place) -> None:
    """The first call's time is over before pytest has started; what it passed, failed or lost before is left as it is."""
    check = made_check(tmp_path / "made", left=LEFT)
    first = {"test": "test_before.py::test_x", "outcome": "passed", "seconds": 1.0, "why": "", "of": "made"}
    place.tests.write_text(json.dumps(first) + "\n")
    row = gpu_check.run_check(check, replace(place, until=time.time() + 0.1))
    assert (row.verdict, row.detail) == ("works", "1 passed; 2 not tried: no time was left")
    assert not (tmp_path / "made" / "ran").exists()
    gpu_check.begin(place, go_on=True)
    for _ in range(2):
        row = gpu_check.run_check(check, place)
        assert (row.verdict, row.detail) == ("works", "3 passed")
        assert (tmp_path / "made" / "ran").read_text() == "one two "
    gpu_check.begin(place, go_on=False)
    assert not gpu_check.outcomes(place.tests) and not place.log.exists()


def test_a_second_call_reads_past_what_a_killed_one_left_half_written(tmp_path: Path, place: gpu_check.Place) -> None:
    """And writes nothing behind the half of a line."""
    check = made_check(tmp_path / "made", left=LEFT)
    first = {"test": "test_before.py::test_x", "outcome": "passed", "seconds": 1.0, "why": "", "of": "made"}
    place.tests.write_text(json.dumps(first) + '\n{"test": "test_made.py::te')
    place.rows.write_text(json.dumps(asdict(gpu_check.Row("a", "works", "3 passed"))) + '\n{"what": "b", "verd')
    gpu_check.begin(place, go_on=True)
    assert place.rows.read_text().endswith("}\n") and list(gpu_check.complete(place.rows)) == ["a"]
    with place.tests.open("a") as file:
        file.write('{"test": "half a line, while pytest runs')
    row = gpu_check.run_check(check, place)
    assert (row.verdict, row.detail) == ("works", "3 passed")


@pytest.mark.parametrize(("platform", "named"), [("cuda", "cuda"), ("", "an earlier check")])
def test_results_of_another_platform_are_not_gone_on_with(tmp_path: Path, platform: str, named: str) -> None:
    place = gpu_check.Place("cuda", time.time(), tmp_path)
    place.rows.write_text(json.dumps(asdict(gpu_check.Row("a", "works", "", platform=platform))) + "\n")
    words = ["--platform", "cpu", "--go-on", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu_check", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"is of {named}, and --go-on keeps it: give another --out" in done.stdout


def test_a_second_call_takes_complete_rows_as_they_are(monkeypatch: pytest.MonkeyPatch, place: gpu_check.Place) -> None:
    """A check of the first is done, one lacked something, one failed, and for one there was no time."""
    names, verdicts = ("a", "b", "c", "d"), ("works", "works", "failed", "not run")
    parts = [gpu_check.Row("a part", "works", "1.0"), gpu_check.Row("b part", "absent", "gone")]
    details = ("3 passed", "1 passed; 2 not tried: needs Ray", "1 failed", gpu_check.LATE)
    rows = [*parts, *(gpu_check.Row(*values) for values in zip(names, verdicts, details, strict=True))]
    place.rows.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    monkeypatch.setattr(gpu_check, "PARTS", {"a part": ("print(1.5)", ""), "b part": ("print(2.5)", "")})
    monkeypatch.setattr(gpu_check, "CHECKS", [gpu_check.Check(name, ()) for name in names])
    monkeypatch.setattr(gpu_check, "run_check", lambda check, _: gpu_check.Row(check.what, "works", "again"))
    assert [row.detail for row in gpu_check.check(place)] == ["1.0", "2.5", "3 passed", "again", "again", "again"]


KILLED = """
import os, signal

def test_fails():
    print("said besides")
    assert 1 == 2, "one is not two"

def test_ends_everything():
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_who_is_killed_amid_a_check_leaves_what_its_tests_said(tmp_path: Path, place: gpu_check.Place) -> None:
    check = made_check(tmp_path / "made", killed=KILLED)
    code = "from pathlib import Path; from tools.gpu_check import *; "
    code += f"run_check(Check('made', {check.tests}), Place('cpu', {place.until}, Path({str(tmp_path)!r})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert "AssertionError: one is not two" in place.log.read_text() and "said besides" in place.log.read_text()
    assert lines_of(place) == {"test_killed.py::test_fails": "failed", "test_killed.py::test_ends_everything": "begun"}


HANGING = """
import ctypes

def test_hangs():
    lock, lib = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    lib.pthread_mutex_lock(lock)
    lib.pthread_mutex_lock(lock)

def test_passes():
    pass
"""


def test_a_test_that_hangs_outside_python_costs_itself_alone(tmp_path: Path, place: gpu_check.Place) -> None:
    """A mutex that is taken twice: no signal ends it. PyDLL keeps Python's lock as well, so that no thread can help."""
    check = replace(made_check(tmp_path / "made", hanging=HANGING), each_s=2.0 - gpu_check.HANGING_S)
    row = gpu_check.run_check(check, place)
    assert lines_of(place) == {"test_hanging.py::test_hangs": "begun", "test_hanging.py::test_passes": "passed"}
    assert row.verdict == "failed" and "test_hangs: the process ended within it; 1 passed" in row.detail
    assert "in test_hangs" in place.log.read_text(), "where it hung"


def test_a_platform_that_is_not_there_is_refused_with_a_reason() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--platform", "cuda", "tests/tools/test_gpu_check.py"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 4
    assert "--platform cuda: this machine shows no NVIDIA GPU" in done.stderr
