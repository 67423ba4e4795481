"""Where the time of the test suite goes: seconds, and those of processors, by file, as the suite itself tells in the end.

    python -m bench.suite [arguments for pytest]

Runs what `make test` runs after its checks. Files are worked off side by side, so that their seconds add up to more than the
whole took; processors' are the same whatever else the machine does. The goal is 20 minutes on two cores. Exits as the suite does.
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

from bench.support.measure import write
from bench.support.quickstart import ROOT

GOAL_S = 20 * 60
FILE = re.compile(r" *(\d+) +(\d+) (tests/\S+)")
ALL = re.compile(r" *(\d+) +(\d+) all (\d+), within (\d+) s")
PASSED = re.compile(r"(\d+) passed")
FAILED = re.compile(r"(\d+) failed")


def read(text: str) -> dict[str, Any]:
    """What the suite's output says of its time. Raises ValueError where it came to no end."""
    whole = ALL.search(text)
    if whole is None:
        raise ValueError("the suite ended before it told what its files took")
    of_files, cpu_s, num_files, seconds = map(int, whole.groups())
    # The first pass over all files; those that failed in it are tried again after that.
    summary = next((line for line in text[whole.end() :].splitlines() if PASSED.search(line)), "")
    passed, failed = PASSED.search(summary), FAILED.search(summary)
    return {
        "goal_s": GOAL_S,
        "seconds": seconds,
        "cpu_s": cpu_s,
        "of_files_s": of_files,
        "num_files": num_files,
        "passed": int(passed[1]) if passed else 0,
        "failed": int(failed[1]) if failed else 0,
        "longest": [[name, int(each_s), int(each_cpu_s)] for each_s, each_cpu_s, name in FILE.findall(text)],
    }


def main(words: list[str]) -> int:
    """The suite's exit code."""
    lines = []
    command = [sys.executable, "-m", "tests.suite", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as suite:
        assert suite.stdout is not None
        for line in suite.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    write("suite", read("".join(lines)), None)
    return suite.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
