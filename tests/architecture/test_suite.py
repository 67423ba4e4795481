"""The queue of tests/suite.py names files that are there, and those that share a server are one of its entries."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.suite import MOST_AGAIN, main, num_workers
from tests.support import forked_workers
from tests.support.cpu_seconds import Clock
from tests.support.file_order import COPIED, KEPT, LOADED, LONGEST, ONE_SERVER, entry_of, next_of, place_of

ROOT = Path(__file__).parents[2]
# Its child ends at once; the grandchild belongs to another by then, and is not counted as a child of this one.
ORPHAN = """
import os, sys, time
from pathlib import Path
from tests.support.cpu_seconds import Clock
clock = Clock()
group = Path(f"/sys/fs/cgroup/cpuacct/tests-{os.getpid()}"), Path(f"/sys/fs/cgroup/tests-{os.getpid()}")
joined = any(each.exists() for each in group)
reader, writer = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        while time.process_time() < 0.5:
            pass
        os.write(writer, b"done")
    os._exit(0)
os.wait()
os.read(reader, 4)
print(joined, clock.seconds(), clock.close(), any(each.exists() for each in group))
"""


def test_the_files_that_the_queue_names_are_there() -> None:
    assert [name for name in (*LONGEST, *ONE_SERVER) if not (ROOT / name).is_file()] == []
    assert len(set(LONGEST)) == len(LONGEST)


@pytest.mark.parametrize(
    ("files", "fixture", "kind"),
    [(ONE_SERVER, "served", "Pool"), (COPIED, "copies", "Copies"), (LOADED, "loaded", "ForkServerContext")],
)
def test_the_files_that_ask_for_one_process_are_one_entry(files: tuple[str, ...], fixture: str, kind: str) -> None:
    asks = [path for path in ROOT.glob("tests/**/test_*.py") if re.search(rf"\b{fixture}: {kind}\b", path.read_text())]
    assert sorted(str(path.relative_to(ROOT)) for path in asks) == sorted(files)
    assert {entry_of(f"{file}::test") for file in files} == {files[0]}


def test_long_files_come_first_and_one_entry_together() -> None:
    first, second, *_ = LONGEST
    tests = [
        f"{ONE_SERVER[1]}::a",
        "tests/core/test_log.py::b",
        f"{second}::c",
        f"{ONE_SERVER[0]}::d",
        f"{first}::e[x]",
    ]
    assert [test.partition("::")[2] for test in sorted(tests, key=place_of)] == ["e[x]", "c", "a", "d", "b"]


def test_one_worker_computes_beside_those_that_wait() -> None:
    short = [f"tests/rooms/test_{index}.py" for index in range(KEPT + 2)]
    queue = [*LONGEST[3:5], *short]
    assert next_of(queue, computes=False) == LONGEST[3]
    assert next_of(queue, computes=True) == short[-1]
    assert next_of(queue[:-1], computes=True) == short[-2]
    assert next_of(queue[:-2], computes=True) == LONGEST[3]  # the rest is for the end
    assert next_of(short[:1], computes=True) == short[0]


def test_one_worker_more_than_cores_where_the_memory_suffices() -> None:
    gib = 2**30
    assert num_workers(2, 24 * gib) == 3
    assert num_workers(16, 24 * gib) == 4
    assert num_workers(2, 5 * gib) == 1


def test_seconds_of_processors_are_those_of_orphans_too_and_leave_no_group() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ORPHAN], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    joined, seconds, closed, left = ran.stdout.split()
    assert (float(seconds) >= 0.5) == (joined == "True")
    assert closed == "True" and left == "False"


def test_a_folder_that_is_no_control_group_is_not_taken_for_one(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    assert clock.seconds() > 0.0 and clock.close()
    assert list(tmp_path.iterdir()) == []


TESTS = """
from pathlib import Path
import pytest
RUNS = Path(__file__).with_name("runs")
def test_before_it() -> None:
    RUNS.with_name("before").write_text("b")
def test_that_passes_alone() -> None:
    assert RUNS.with_name("before").read_text() == "b"
    RUNS.with_name("before").unlink()
    with RUNS.open("a") as file:
        file.write("x")
    assert len(RUNS.read_text()) > 1
@pytest.mark.parametrize("which", range({failing}))
def test_that_never_passes(which: int) -> None:
    assert which < 0
"""


LOADED_ONCE = """
import os
from pathlib import Path
LOADED = Path(__file__).with_name("loaded")
with LOADED.open("a") as file:
    file.write(f"{os.getpid()} ")
def test_in_a_copy() -> None:
    assert {str(os.getppid())} == {*LOADED.read_text().split()}
    LOADED.with_name(f"worker {os.getpid()}").touch()
"""


def test_workers_are_copies_of_one_process_that_has_loaded_all_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("test_one.py", "test_two.py"):
        (tmp_path / name).write_text(LOADED_ONCE)
    assert main(["-n2", "."], tmp_path, tmp_path / "cache") == 0
    assert len((tmp_path / "loaded").read_text().split()) == len([*tmp_path.glob("worker *")]) == 2


def test_a_worker_is_one_of_the_usual_kind_where_nobody_makes_copies(tmp_path: Path) -> None:
    command = [sys.executable, "-I", forked_workers.__file__, str(tmp_path / "nobody"), "-u", "-c", "print('works')"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == "works\n"


ONCE = """
from pathlib import Path
def test_that_passes() -> None:
    Path(__file__).with_name("again").touch(exist_ok=False)
"""


@pytest.mark.parametrize(("failing", "code", "runs"), [(0, 0, 2), (1, 1, 2), (MOST_AGAIN, 1, 1)])
def test_the_files_of_a_few_that_fail_are_run_once_more_and_what_fails_again_fails(
    failing: int,
    code: int,
    runs: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the queue's own modules
    (tmp_path / "test_some.py").write_text(TESTS.format(failing=failing))
    (tmp_path / "test_other.py").write_text(ONCE)
    assert main(["-n1", "."], tmp_path, tmp_path / "cache") == code
    assert len((tmp_path / "runs").read_text()) == runs
    out = capfd.readouterr().out
    assert ("all passed alone" in out) == (code == 0)
    named = re.findall(r"^  \S*test_some.py::(test_that\w+)", out.partition("once more, alone:")[2], flags=re.MULTILINE)
    assert named == (["test_that_never_passes", "test_that_passes_alone"][1 - failing :] if runs == 2 else [])
