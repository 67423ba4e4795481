"""Limits that the system sets for a process, and that a run's processes need more of."""

from __future__ import annotations

import resource
from pathlib import Path

# The router has two connections for each request. Ray raises the limit only where a run starts a Ray of its own; `ray start` and
# SLURM pass on what the login shell had, often 1024.
OPEN_FILES = 65536


def raise_open_files(wanted: int = OPEN_FILES) -> None:
    """Let this process, and those that it starts, have so many files open, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


MIB = 2**20
# Of a process, with what `ulimit` calls it. Nobody sets these by default.
BYTES = {
    resource.RLIMIT_AS: "{} of address space (ulimit -v)",
    resource.RLIMIT_DATA: "{} of data (ulimit -d)",
    resource.RLIMIT_FSIZE: "{} in a file (ulimit -f)",
}
# Fewer than these are few: Ray and the libraries start hundreds of threads.
FEW_FILES, FEW_THREADS = 1024, 4096
MOST_PIDS = Path("/sys/fs/cgroup/pids.max")  # of a container, where it has one of its own


def tight() -> str:
    """What the system lets this process, and those that it starts, have little of, as a sentence; empty where that is nothing."""
    found = []
    for kind, words in BYTES.items():
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            found.append(words.format(f"{soft / MIB:,.1f} MiB"))
    counts = [(resource.getrlimit(resource.RLIMIT_NPROC)[0], "threads of this user (ulimit -u)", FEW_THREADS)]
    counts += [(resource.getrlimit(resource.RLIMIT_NOFILE)[1], "open files (ulimit -Hn)", FEW_FILES)]
    pids = MOST_PIDS.read_text().strip() if MOST_PIDS.exists() else ""
    counts += [(int(pids), f"threads of this container ({MOST_PIDS})", FEW_THREADS)] if pids.isdigit() else []
    found += [f"{most:,} {words}" for most, words, few in counts if most != resource.RLIM_INFINITY and most < few]
    return f"This process has limits that may be the reason: {', '.join(found)}. Raise them." if found else ""
