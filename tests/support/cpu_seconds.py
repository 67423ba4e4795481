"""Seconds of processors that a process takes together with all that come of it, whatever becomes of their parents."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

MOUNTS = Path("/sys/fs/cgroup")
CLOSE_S = 2.0


class Clock:
    """Counts from where it is made: of this process and of all processes that begin below it from now on.

    By a control group of its own, where the system gives one; else without the processes that end as children of others.
    """

    def __init__(self, mounts: Path = MOUNTS) -> None:
        self._usage = self._joined(mounts)

    def _joined(self, mounts: Path) -> Path | None:
        for parent, usage in ((mounts / "cpuacct", "cpuacct.usage"), (mounts, "cpu.stat")):
            group = parent / f"tests-{os.getpid()}"
            try:
                (parent / "cgroup.procs").read_text()  # elsewhere a folder is only a folder
                group.mkdir(exist_ok=True)
                (group / usage).read_text()
                (group / "cgroup.procs").write_text(str(os.getpid()))
            except OSError:
                continue
            return group / usage
        return None

    def seconds(self) -> float:
        """So far."""
        if self._usage is None:
            spent = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
            return sum(each.ru_utime + each.ru_stime for each in spent)
        text = self._usage.read_text()
        return int(text) / 1e9 if text.strip().isdigit() else int(text.split()[1]) / 1e6

    def close(self) -> bool:
        """Go back to where this process was, with what still runs. Whether the group is gone: a process may be ending."""
        if self._usage is None:
            return True
        group, self._usage = self._usage.parent, None
        end = time.monotonic() + CLOSE_S
        while group.exists() and time.monotonic() < end:
            try:
                for pid in (group / "cgroup.procs").read_text().split():
                    (group.parent / "cgroup.procs").write_text(pid)
                group.rmdir()
            except OSError:  # a process that has ended since it was listed, or is about to
                time.sleep(0.02)
        return not group.exists()
