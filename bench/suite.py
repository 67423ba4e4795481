"""Where the time of the test suite goes: seconds, and those of processors, by file, as the suite itself tells in the end.

    python -m bench.suite [arguments for pytest]

Runs what `make test` runs after its checks. Files are worked off side by side, so that their seconds add up to more than the
whole took. A shared machine has slow hours, in which processors' seconds grow, too: how long a fixed piece of work takes on all
cores, before and after, says which. The goal is 20 minutes on two cores. Only a run of the whole is recorded in which every test
passed, beside others or when it was run again alone. Exits as the suite does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from typing import Any

from bench.support.measure import write
from bench.support.quickstart import ROOT

GOAL_S = 20 * 60
FILE = re.compile(r" *(\d+) +(\d+) (tests/\S+)")
ALL = re.compile(r" *(\d+) +(\d+) all (\d+), within (\d+) s")
PASSED = re.compile(r"(\d+) passed")
FAILED = re.compile(r"(\d+) failed")
WORK = "sum(number * number % 7 for number in range(20_000_000))"


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


def work_s() -> float:
    """Seconds of the fixed work, on every core at once."""
    began = time.perf_counter()
    working = [subprocess.Popen([sys.executable, "-I", "-c", WORK]) for _ in os.sched_getaffinity(0)]
    if any(each.wait() for each in working):
        raise RuntimeError(f"{WORK} failed")
    return round(time.perf_counter() - began, 2)


def main(words: list[str]) -> int:
    """The suite's exit code."""
    lines = []
    command, before_s = [sys.executable, "-m", "tests.suite", *words], work_s()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as suite:
        assert suite.stdout is not None
        for line in suite.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    result = read("".join(lines)) | {"work_s": [before_s, work_s()]}
    if suite.returncode or words:
        print("not recorded:", result)
    else:
        write("suite", result, None)
    return suite.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
