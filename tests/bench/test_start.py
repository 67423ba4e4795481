"""Which processes a start is made of, and what each took."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from bench.start import Watch

# A process that waits for a child, which computes until it is told to end.
CHILD = "import sys\nprint('begun', flush=True)\nwhile True: sum(range(10000))"
PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {CHILD!r}])"
DEADLINE_S = 20.0


def test_a_childs_seconds_are_counted_under_its_name() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"begun\n"
            watch, end = (
                Watch(process.pid, {"-c import subprocess": "waits", "-c import sys": "computes"}),
                time.monotonic() + DEADLINE_S,
            )
            while len(watch.seen) < 2 or watch.by_name().get("computes", {"cpu_s": 0})["cpu_s"] < 0.2:
                assert time.monotonic() < end, watch.seen
                watch.look()
            found = watch.by_name()
            assert set(found) == {"waits", "computes"} and found["computes"]["count"] == 1
        finally:
            os.killpg(process.pid, signal.SIGKILL)
