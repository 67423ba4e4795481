"""Memory that ran out: a machine's or a container's, for which the kernel ends processes, and a device's: what to do then."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import psutil

COUNTS = Path("/proc/vmstat")
# torch's own error, and what the libraries below it say.
DEVICE_MEMORY = ("OutOfMemoryError", "CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


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


def device_memory_advice(error: BaseException) -> str:
    """What to do where a device's memory ran out, as a line of its own; empty where it did not."""
    if not any(word in f"{type(error).__name__}: {error}" for word in DEVICE_MEMORY):
        return ""
    return (
        "The device's memory is full. What takes less: a smaller actor.micro_batch_tokens, actor.recompute=full, more tensor or "
        "pipeline parallel (actor.parallel), actor.offload and rollout.offload, a smaller share for servers on the same "
        "devices (rollout.server_args=[--mem-fraction-static, '0.2']). `megarl plan RECIPE` predicts each.\n"
    )
