"""A server's share of a device that others hold a part of already, as ranks do where one is started again beside them.

SGLang takes `--mem-fraction-static` of what it finds free (0.5.21, mem_cache/kv_cache_configurator.py), so that a second start
would have less than the first, which began before the ranks did. What a plan or a recipe gives a server is a share of the device.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.core.platform import visible_cuda_devices
from megarl.core.words import last_value

FLAG, NODES = "--mem-fraction-static", "--nnodes"
ASK = ("--query-gpu=memory.total,memory.used", "--format=csv,noheader,nounits")  # as SGLang asks for the first
ANSWER_S = 30.0
# MiB: what others hold is nothing below it; what a server holds before it looks, and beside its share (placement/rates.py).
NOTICED, STARTED, BESIDE = 1024.0, 512.0, 2560.0


@dataclass(frozen=True)
class Held:
    """Of one device, in MiB."""

    total: float
    used: float


def share_flags(argv: Sequence[str], devices: Sequence[Held]) -> tuple[str, ...]:
    """What to say behind a server's flags, so that it has as much as on a device that nobody else is on; nothing where it does.

    Never so much that no room is left beside. Of a server over several nodes all parts have to say the same: they are left alone.
    """
    share, nodes = _number(argv, FLAG), _number(argv, NODES)
    if share is None or (nodes or 1) > 1 or not devices:
        return ()
    fullest = max(devices, key=lambda each: each.used - each.total)
    if fullest.used < NOTICED:
        return ()
    before, now = fullest.total - STARTED, fullest.total - STARTED - fullest.used
    if now <= BESIDE:
        return ()
    found = min(share * before / now, 1 - BESIDE / now)
    return (FLAG, f"{found:.3f}") if found > share else ()


def devices_in_use() -> list[Held]:
    """What is held of each device that this process may use; nothing where nobody says."""
    visible = visible_cuda_devices()
    if not visible:
        return []
    try:
        asked = subprocess.run(
            ["nvidia-smi", "-i", ",".join(visible), *ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=True,
        )
        return [Held(*map(float, line.split(","))) for line in asked.stdout.splitlines()]
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return []  # parts of a device have no answer


def _number(argv: Sequence[str], flag: str) -> float | None:
    """What follows a flag the last time; None where it is not there, or is no number."""
    try:
        return float(last_value(argv, flag) or "")
    except ValueError:
        return None  # SGLang's own parser refuses what is none
