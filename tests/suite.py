"""The whole suite, worked off file by file by several processes: `python -m tests.suite [arguments for pytest]`.

Most tests wait much of the time, for processes that start or for deadlines: there is one worker more than there are cores, where
the memory suffices. Which file comes first is said in tests/support/file_order.py. Exits as pytest does.
"""

from __future__ import annotations

import os
import subprocess
import sys

UNBUFFERED = {"PYTHONUNBUFFERED": "1"}  # what a killed run has printed is there
WORKER_BYTES = 6 * 2**30  # what the largest runs of tests hold: three nodes with their ranks and servers


def num_workers(cores: int, memory_bytes: int) -> int:
    """How many files are worked on at once."""
    return max(1, min(cores + 1, memory_bytes // WORKER_BYTES))


def command(words: list[str]) -> list[str]:
    """How pytest runs all that needs no GPU."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    workers = num_workers(len(os.sched_getaffinity(0)), memory)
    queue = ["-p", "tests.support.file_queue", "--dist", "loadfile", "--no-loadscope-reorder"]
    return [sys.executable, "-m", "pytest", "-m", "not gpu", *queue, "-n", str(workers), *words]


if __name__ == "__main__":
    # Every run of a test starts half a dozen processes, which compile megarl anew where Python is told to write no bytecode.
    subprocess.run([sys.executable, "-m", "compileall", "-q", "megarl", "tests"], check=True)
    sys.exit(subprocess.run(command(sys.argv[1:]), env=os.environ | UNBUFFERED, check=False).returncode)
