"""Control groups, where some can be had: memory and processes of each sandbox, held by the kernel over all of its processes.

Version 1 and version 2 of the interface. Where the pool may make no groups (an ordinary user mostly, and most containers),
`find` says None, and watch.py holds the memory.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from megarl.sandbox.job import Limits

PREFIX = "megarl-sandboxes-"  # then the keeper's pid
OWN_PROCESSES = 2  # bubblewrap's two beside the program's
CONTROLLERS = ("memory", "pids")


@dataclass(frozen=True)
class Group:
    """One sandbox's group: a folder for each hierarchy, one in version 2."""

    folders: tuple[Path, ...]

    def doors(self) -> list[int]:
        """Open files: a process that writes `0` into all of them is inside. The caller closes them."""
        return [os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for folder in self.folders]

    def memory_kills(self) -> int:
        """How many processes the kernel has killed because the group's memory was full."""
        for folder in self.folders:
            for name in ("memory.events", "memory.oom_control"):
                if (file := folder / name).exists():
                    words = dict(line.split()[:2] for line in file.read_text().splitlines())
                    return int(words.get("oom_kill", 0))
        return 0

    def removed(self) -> bool:
        """Try to remove it: whether it is gone. The kernel takes a moment after the last process."""
        left = [folder for folder in self.folders if not _removed(folder)]
        return not left


@dataclass(frozen=True)
class Groups:
    """Where a pool's groups are made. version: of the interface. parents: a folder for each hierarchy."""

    version: int
    parents: tuple[Path, ...]

    def make(self, number: int, limits: Limits) -> Group:
        """A new group with its bounds. Raises OSError."""
        group = Group(tuple(parent / str(number) for parent in self.parents))
        for folder in group.folders:
            folder.mkdir()
            for name, value in _settings(self.version, limits).items():
                if (folder / name).exists():
                    (folder / name).write_text(value)
        return group

    def removed(self) -> bool:
        """Try to remove the folders that all groups were in: whether they are gone."""
        return Group(self.parents).removed()


def find(proc: Path = Path("/proc/self")) -> Groups | None:
    """Folders in which this process may make groups with bounds on memory and processes; None where there are none.

    proc: where the kernel says which groups this process is in, and where they are mounted.
    """
    mounts = _mounts(proc)
    own = _own(proc)
    if all(name in mounts and name in own for name in CONTROLLERS):
        folders = dict.fromkeys(_place(*mounts[name], own[name]) for name in CONTROLLERS)
        return _claim(1, tuple(folders))
    if "" in mounts and "" in own:
        place = _place(*mounts[""], own[""])
        # Version 2 wants no processes beside groups with bounds: the own group is not asked.
        while place != mounts[""][1]:
            place = place.parent
            enabled = _words(place / "cgroup.subtree_control")
            if enabled.issuperset(CONTROLLERS) and (found := _claim(2, (place,))) is not None:
                return found
    return None


def _settings(version: int, limits: Limits) -> dict[str, str]:
    """What is written into a group's files; those that a kernel does not have are left out."""
    memory, processes = str(limits.memory_bytes), str(limits.processes + OWN_PROCESSES)
    if version == 1:
        return {
            "memory.limit_in_bytes": memory,
            "memory.memsw.limit_in_bytes": memory,  # in this order: it may not be below the other
            "pids.max": processes,
        }
    return {"memory.max": memory, "memory.swap.max": "0", "memory.oom.group": "1", "pids.max": processes}


def _claim(version: int, places: tuple[Path, ...]) -> Groups | None:
    """Make the folder for all groups of this process, try one group in it, and move a process there; None if any fails."""
    for place in places:
        _sweep(place)
    groups = Groups(version, tuple(place / f"{PREFIX}{os.getpid()}" for place in places))
    try:
        for parent in groups.parents:
            parent.mkdir()
            if version == 2:
                (parent / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in CONTROLLERS))
        trial = groups.make(0, Limits())
        doors = trial.doors()
    except OSError:
        for parent in groups.parents:
            _removed(parent / "0")
            _removed(parent)
        return None
    entered = _enters(doors)
    trial.removed()
    if not entered:
        groups.removed()
    return groups if entered else None


def _enters(doors: list[int]) -> bool:
    """Whether a child of this process gets into a group. Making one is not yet being let in."""
    child = os.fork()
    if child == 0:
        try:
            for door in doors:
                os.write(door, b"0")
        except OSError:
            os._exit(1)
        os._exit(0)
    for door in doors:
        os.close(door)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _sweep(place: Path) -> None:
    """Remove what keepers left that were killed together with their pool: their groups are empty."""
    for old in place.glob(f"{PREFIX}*"):
        pid = old.name.removeprefix(PREFIX)
        if pid.isdigit() and not Path("/proc", pid).exists():
            with contextlib.suppress(FileNotFoundError):  # another keeper that starts sweeps as well
                for folder in (*(each for each in old.iterdir() if each.is_dir()), old):
                    _removed(folder)


def _removed(folder: Path) -> bool:
    """Whether the folder is gone."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _mounts(proc: Path) -> dict[str, tuple[str, Path]]:
    """By controller, "" for version 2: which part of the hierarchy is mounted, and where."""
    found = {}
    for line in (proc / "mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        root, place = left.split()[3:5]
        kind, _, options = right.split()[:3]
        if kind == "cgroup2":
            found[""] = root, Path(place)
        elif kind == "cgroup":
            found |= {name: (root, Path(place)) for name in options.split(",") if name in CONTROLLERS}
    return found


def _own(proc: Path) -> dict[str, str]:
    """By controller, "" for version 2: the group of this process."""
    found: dict[str, str] = {}
    for line in (proc / "cgroup").read_text().splitlines():
        number, names, path = line.split(":", 2)
        found |= dict.fromkeys(names.split(","), path) if number != "0" else {"": path}
    return found


def _place(root: str, mount: Path, group: str) -> Path:
    """The folder of a group, seen through the mount; the mount's own where the group is outside of it."""
    below = os.path.relpath(group, root)
    return mount if below.startswith("..") or below == "." else mount / below


def _words(file: Path) -> set[str]:
    try:
        return set(file.read_text().split())
    except OSError:
        return set()
