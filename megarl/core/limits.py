"""Limits that the system sets for a process, and that a run's processes need more of."""

from __future__ import annotations

import resource

# The router has two connections for each request. Ray raises the limit only where a run starts a Ray of its own; `ray start` and
# SLURM pass on what the login shell had, often 1024.
OPEN_FILES = 65536


def raise_open_files(wanted: int = OPEN_FILES) -> None:
    """Let this process, and those that it starts, have so many files open, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
