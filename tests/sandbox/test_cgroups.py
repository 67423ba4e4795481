"""Where control groups are found, in both versions of the interface. That they hold is shown by the escapes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megarl.sandbox import cgroups
from megarl.sandbox.job import MIB, Limits

LIMITS = Limits(memory_bytes=64 * MIB, processes=8)


def proc(folder: Path, mounts: str, own: str) -> Path:
    (folder / "mountinfo").write_text(mounts)
    (folder / "cgroup").write_text(own)
    return folder


@pytest.fixture
def let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders as the kernel makes them: with files, and open to a process."""
    make = Path.mkdir

    def mkdir(self: Path, *words: object, **named: object) -> None:
        make(self, *words, **named)
        for name in ("cgroup.procs", "cgroup.subtree_control", "memory.max", "memory.swap.max", "pids.max",
                     "memory.limit_in_bytes", "memory.events"):  # fmt: skip
            (self / name).touch()

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(cgroups, "_removed", lambda folder: True)


def test_version_two_is_found_above_the_own_group(tmp_path: Path, let_in: None) -> None:
    top = tmp_path / "fs"
    own = top / "user.slice" / "app.slice" / "session.scope"
    own.mkdir(parents=True)
    for folder in (top, top / "user.slice", top / "user.slice" / "app.slice"):
        (folder / "cgroup.subtree_control").touch()
    (top / "user.slice" / "cgroup.subtree_control").write_text("cpu memory pids\n")
    (top / "user.slice" / "app.slice" / "cgroup.subtree_control").write_text("memory\n")  # without pids
    where = proc(tmp_path, f"25 1 0:23 / {top} rw - cgroup2 cgroup2 rw\n", "0::/user.slice/app.slice/session.scope\n")
    found = cgroups.find(where)
    assert found is not None and found.version == 2
    [parent] = found.parents
    assert parent.parent == top / "user.slice"
    assert (parent / "cgroup.subtree_control").read_text() == "+memory +pids"
    group = found.make(1, LIMITS)
    assert (group.folders[0] / "memory.max").read_text() == str(64 * MIB)
    assert (group.folders[0] / "memory.swap.max").read_text() == "0"
    assert (group.folders[0] / "pids.max").read_text() == "10"  # bubblewrap's own two beside
    assert not (group.folders[0] / "memory.oom.group").exists()  # what a kernel does not have is left out
    (group.folders[0] / "memory.events").write_text("low 0\nmax 4\noom 2\noom_kill 3\n")
    assert group.memory_kills() == 3


def test_version_one_is_found_in_both_hierarchies(tmp_path: Path, let_in: None) -> None:
    memory, pids = tmp_path / "memory", tmp_path / "pids"
    (memory / "job").mkdir(parents=True)
    (pids / "elsewhere").mkdir(parents=True)
    mounts = (
        f"30 1 0:26 /docker/x {memory} rw - cgroup cgroup rw,memory\n31 1 0:27 / {pids} rw - cgroup cgroup rw,pids\n"
        f"32 1 0:28 / {tmp_path}/unified rw - cgroup2 cgroup2 rw\n"
    )
    found = cgroups.find(proc(tmp_path, mounts, "4:memory:/docker/x/job\n8:pids:/elsewhere\n0::/\n"))
    assert found is not None and found.version == 1
    assert [each.parent for each in found.parents] == [memory / "job", pids / "elsewhere"]


def test_none_are_found_where_none_may_be_made(tmp_path: Path) -> None:
    where = proc(tmp_path, f"25 1 0:23 / {tmp_path} rw - cgroup2 cgroup2 rw\n", "0::/a\n")
    (tmp_path / "cgroup.subtree_control").write_text("memory")
    before = sorted(tmp_path.iterdir())
    assert cgroups.find(where) is None  # processes are not counted there
    assert sorted(tmp_path.iterdir()) == before
    assert cgroups.find(proc(tmp_path, "", "")) is None


def test_what_another_keeper_sweeps_at_the_same_time_is_gone_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid in (2**22 + 1, 2**22 + 2):  # no process has such a number
        (tmp_path / f"{cgroups.PREFIX}{pid}" / "1").mkdir(parents=True)
    monkeypatch.setattr(cgroups, "_removed", lambda _: [shutil.rmtree(each) for each in tmp_path.iterdir()])
    cgroups._sweep(tmp_path)
    assert not [*tmp_path.iterdir()]
