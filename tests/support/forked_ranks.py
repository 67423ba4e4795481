"""Ranks of tests as copies of one process that has loaded torch and Megatron, which costs seconds of a core each time.

On devices each rank is a process that starts from nothing, with a device of its own: CUDA survives no fork. Not for tests of
how a process starts.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from megarl.sandbox.kernel import die_with_parent
from tests.support.platforms import chosen, lacking_devices

GRACE_S = 10.0  # for the others to end by themselves, once a rank has failed


class Ranks:
    """Starts ranks, one group of them after the other."""

    def __init__(self) -> None:
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.forked_ranks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def run(self, module: str, count: int, *words: object, log: Path, deadline_s: float = 240.0) -> str:
        """The module's `main`, with `sys.argv` [module, rank, *words], in so many processes, until all have ended.

        What they printed, which goes to `log`, where one of them failed or the deadline passed; otherwise nothing. Skips the test
        where each rank should have a device of its own, and there are fewer.
        """
        if without := lacking_devices(chosen(), count):
            pytest.skip(without)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        log.touch()
        wanted = {"module": module, "count": count, "words": [str(word) for word in words], "log": str(log)}
        self._process.stdin.write(json.dumps(wanted).encode() + b"\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], deadline_s)[0]:
            self.close()
            self._process = self._start()  # for the next
            return f"not done after {deadline_s:g} s: {log.read_text()}"
        codes = json.loads(self._process.stdout.readline() or b'["the process that starts ranks has ended"]')
        return "" if codes == [0] * count else f"exit codes {codes}: {log.read_text()}"

    def close(self) -> None:
        """End everybody."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@contextmanager
def forked_ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    try:
        yield ranks
    finally:
        ranks.close()


def _rank(rank: int, module: str, words: list[str], log: str) -> None:
    """What a rank's process does."""
    die_with_parent()
    if chosen().has_device_memory:
        devices = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[rank] if len(devices) > rank else str(rank)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = [module, str(rank), *words]
    importlib.import_module(module).main()


def _run_all(module: str, count: int, words: list[str], log: str) -> list[int | None]:
    """Start the ranks and wait for them; their exit codes. Where one fails, the others are killed a little later."""
    start = _start_of(module)
    processes: list[BaseProcess] = [start(target=_rank, args=(rank, module, words, log)) for rank in range(count)]
    for process in processes:
        process.start()
    left, grace_s = {process.sentinel: process for process in processes}, None
    while left and (ended := wait(list(left), grace_s)):
        for sentinel in ended:
            process = left.pop(sentinel)  # type: ignore[call-overload]
            process.join()
            grace_s = GRACE_S if process.exitcode else grace_s
    for process in left.values():
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def _start_of(module: str) -> Any:
    """How a process is started: forked, with the module loaded, where no device forbids it."""
    if chosen().has_device_memory:
        return multiprocessing.get_context("spawn").Process
    importlib.import_module(module)
    return multiprocessing.get_context("fork").Process


def main() -> None:
    """Load, then fork whatever is asked for on standard input. Where a test's process is ended, so is everybody here."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    importlib.import_module("tests.support.loaded")
    for line in sys.stdin:
        print(json.dumps(_run_all(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
