"""Since when a process runs, and which of a run stand still because somebody has stopped them (SIGSTOP, Ctrl-Z); from /proc."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megarl.core import janitor

STATES = {"T": "stopped by a signal", "t": "stopped by a debugger"}
LONGEST_NAME = 60


@dataclass(frozen=True)
class Stopped:
    """A process that stands still. name: as it calls itself."""

    pid: int
    name: str
    how: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}, {self.how})"


def started_at(pid: int) -> int:
    """When a process began, in clock ticks since the machine did; 0 where there is none. With its pid it names one process."""
    try:
        return int(janitor.stat_of(pid)[19])
    except OSError:
        return 0


def stopped(pid: int) -> Stopped | None:
    """What is known of a process that has been stopped; None of one that runs, waits or has ended."""
    try:
        state = janitor.stat_of(pid)[0]
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None  # it ended meanwhile
    return Stopped(pid, command[:LONGEST_NAME], STATES[state]) if state in STATES else None


def stopped_of(run_id: str) -> list[Stopped]:
    """The processes of a run on this machine that stand still."""
    found = (stopped(pid) for pid in sorted(janitor.processes_of(run_id)))
    return [each for each in found if each is not None]
