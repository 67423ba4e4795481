"""The whole suite in two halves, side by side: `python -m tests.suite [arguments for pytest]`.

One half starts servers and ranks and is busy on all cores in turns; the other is what one core computes, and what mostly waits.
The first is shown as it goes, the second when it is done. Exits with 1 where a test of either failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

UNBUFFERED = {"PYTHONUNBUFFERED": "1"}  # what a killed run has printed is there
HALVES = ("slow and not waiting and not gpu", "(not slow or waiting) and not gpu")
# A half that ends in time for neither: the other's tests have deadlines of their own (pyproject.toml).
DEADLINE_S = 80 * 60.0


def command(half: str, words: list[str]) -> list[str]:
    """How pytest runs a half; each has a cache of its own."""
    cache = Path(".pytest_cache") / str(HALVES.index(half))
    return [sys.executable, "-m", "pytest", "-m", half, "-o", f"cache_dir={cache}", *words]


def main(words: list[str]) -> int:
    """Run both; the exit code."""
    shown, kept = HALVES
    with tempfile.TemporaryFile("w+") as output:
        other = subprocess.Popen(
            command(kept, words), stdout=output, stderr=subprocess.STDOUT, env=os.environ | UNBUFFERED
        )
        try:
            first = subprocess.run(command(shown, words), check=False).returncode
            second = other.wait(DEADLINE_S)
        finally:
            if other.poll() is None:
                other.terminate()
                other.wait(60)
        output.seek(0)
        print(f"\n== side by side with the above: {kept}\n{output.read()}", flush=True)
    if first or second:
        print(f"megarl: tests failed: exit codes {first} and {second}, both halves above", file=sys.stderr)
    return int(bool(first or second))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
