"""Whether the kernel has ended processes of this machine because its memory was full, or a container's bound was reached."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import psutil

COUNTS = Path("/proc/vmstat")


def kills(counts: Path = COUNTS) -> int:
    """Processes that the kernel has ended for memory since it started; 0 where it does not say."""
    try:
        lines = counts.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


@dataclass
class OutOfMemory:
    """What the kernel has done since this was made."""

    counts: Path = COUNTS
    _before: int = field(init=False)

    def __post_init__(self) -> None:
        self._before = kills(self.counts)

    def told(self) -> str:
        """For people; empty where nobody was ended for memory."""
        ended = kills(self.counts) - self._before
        if ended <= 0:
            return ""
        memory = psutil.virtual_memory()
        return (
            f"The kernel's out-of-memory killer has ended {ended} process{'es' * (ended > 1)} here since the run began "
            f"(now {memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB are free); dmesg says which."
        )
