"""The whole suite, worked off file by file by several processes: `python -m tests.suite [arguments for pytest]`.

Most tests wait much of the time, for processes that start or for deadlines: there is one worker more than there are cores, where
the memory suffices. Which file comes first is said in tests/support/file_order.py.

Where a few fail, their files are run once more, alone, and said so: three runs on two cores now and then starve one beyond a
deadline that a run has to itself. Whole files, because some break their servers a little more with each test. What fails alone
fails. Exits as pytest does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PYTEST = (sys.executable, "-m", "pytest", "-m", "not gpu")
# What a killed run has printed is there. What one process has compiled, pytest's own form of the tests with it, serves others,
# also where Python is told to write no bytecode: each worker and half a dozen processes of every run load the same.
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": ""}
WORKER_BYTES = 6 * 2**30  # what the largest runs of tests hold: three nodes with their ranks and servers

FAILED = 1  # pytest's exit code where tests failed
MOST_AGAIN = 4  # where more fail it is not the machine
ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".pytest_cache"


def num_workers(cores: int, memory_bytes: int) -> int:
    """How many files are worked on at once."""
    return max(1, min(cores + 1, memory_bytes // WORKER_BYTES))


def command(words: list[str]) -> list[str]:
    """How pytest runs all that needs no GPU, forgetting what failed before."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    workers = num_workers(len(os.sched_getaffinity(0)), memory)
    queue = ["-p", "tests.support.file_queue", "--dist", "loadfile", "--no-loadscope-reorder"]
    return [*PYTEST, "--cache-clear", *queue, "-n", str(workers), *words]


def failures(cache: Path) -> list[str]:
    """The tests, or files, that failed in the last run, as pytest notes them."""
    noted = cache / "v" / "cache" / "lastfailed"
    return sorted(json.loads(noted.read_text())) if noted.is_file() else []


def main(words: list[str], root: Path = ROOT, cache: Path = CACHE) -> int:
    """The exit code. words: options, files and folders, as seen from root. cache: where pytest notes what failed."""
    options = ["--rootdir", str(root), "-o", f"cache_dir={cache}"]
    code = _run(command([*options, *words]), root)
    again = failures(cache)
    if code != FAILED or not 0 < len(again) <= MOST_AGAIN:
        return code
    print("\nFailed beside others; once more, alone:", *again, "", sep="\n  ", flush=True)
    files = sorted({name.partition("::")[0] for name in again})
    code = _run([*PYTEST, *options, *(word for word in words if not (root / word).exists()), *files], root)
    print(f"Of {len(again)} that failed beside others, {'some failed' if code else 'all passed'} alone.", flush=True)
    return code


def _run(command: list[str], root: Path) -> int:
    return subprocess.run(command, cwd=root, env=os.environ | ENVIRONMENT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
