"""What the processes of one sandbox use together, read from /proc: CPU seconds, and memory where no control group counts it.

All of them descend from the first process of their pid namespace, daemons too: it inherits whoever loses a parent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megarl.core import janitor

TICKS_S = 1 / os.sysconf("SC_CLK_TCK")
INODE_BYTES = 1024  # what the kernel keeps of a file without content, about
# Swapped pages count as well: they are memory that somebody else does not have.
COUNTED = ("RssAnon:", "RssShmem:", "VmSwap:")


@dataclass(frozen=True)
class Usage:
    """CPU seconds, those of ended processes included, and bytes of memory, pages of files left out."""

    cpu_s: float
    memory_bytes: int


def children(pid: int) -> list[int]:
    """Pids of the processes that a process has started; none where it has ended."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_bytes().split()]
    except OSError:
        return []


def tree(pid: int) -> Iterator[int]:
    """A process and all that descend from it. Children of other threads than the first are found as well."""
    waiting = [pid]
    while waiting:
        each = waiting.pop()
        yield each
        try:
            threads = os.listdir(f"/proc/{each}/task")
        except OSError:
            continue  # it ended meanwhile
        for thread in threads:
            try:
                waiting += map(int, Path(f"/proc/{each}/task/{thread}/children").read_bytes().split())
            except OSError:
                continue


def usage(pid: int, *, memory: bool) -> Usage:
    """What a process and all that descend from it use. memory: whether to count it, which takes longer."""
    ticks = counted = 0
    for each in tree(pid):
        try:
            fields = janitor.stat_of(each)
            status = Path(f"/proc/{each}/status").read_text(errors="replace") if memory else ""
        except OSError:
            continue
        ticks += sum(map(int, fields[11:15]))  # utime, stime, and those of children that were waited for
        for line in status.splitlines():
            if line.startswith(COUNTED):
                counted += int(line.split()[1]) * 1024
    return Usage(ticks * TICKS_S, counted)


def folder_bytes(folder: int) -> int:
    """What a sandbox's folder takes of the memory, its empty files included. folder: open."""
    found = os.fstatvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize + (found.f_files - found.f_ffree) * INODE_BYTES
