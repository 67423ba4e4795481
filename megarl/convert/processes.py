"""Runs the ranks of a conversion: starts them, listens, and ends them all in every case. Without torch."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from megarl.convert.job import Job, Message, parse_message
from megarl.core.end_signals import ending_of
from megarl.core.errors import DeadlineError, MegarlError, UserError, WorkerDiedError
from megarl.core.platform import get_platform
from megarl.serving.process import GUARD

POLL_S = 0.2
TAIL_BYTES = 3000


@dataclass
class _Process:
    """One rank."""

    rank: int
    process: subprocess.Popen[bytes]
    errors: IO[bytes]  # what it writes to its standard error
    pending: bytes = b""
    told: list[Message] = field(default_factory=list)  # errors that it named itself

    def tail(self) -> str:
        """The last lines of its standard error."""
        size = os.fstat(self.errors.fileno()).st_size
        return os.pread(self.errors.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace").strip()

    def lines(self, data: bytes) -> list[str]:
        """Whole lines of what has come."""
        *whole, self.pending = (self.pending + data).split(b"\n")
        return [line.decode() for line in whole]


def run_ranks(job: Job, listen: Callable[[Message], None], poll: Callable[[], None], *, timeout_s: float) -> None:
    """Run the job on as many processes as its layout has ranks; returns when all have done their part.

    listen: gets the first rank's messages. poll: called a few times a second meanwhile. Every process dies with this one.
    Raises UserError for what a rank says is the user's mistake, WorkerDiedError, with the last lines of its errors, for
    one that ends otherwise, DeadlineError after timeout_s.
    """
    with ExitStack() as stack:
        processes = [_start(rank, job, stack) for rank in range(job.layout.world_size)]
        selector = stack.enter_context(selectors.DefaultSelector())
        for each in processes:
            assert each.process.stdout is not None
            selector.register(each.process.stdout, selectors.EVENT_READ, each)
        end = time.monotonic() + timeout_s
        while selector.get_map():
            if time.monotonic() > end:
                raise DeadlineError(_late(processes, timeout_s))
            for key, _ in selector.select(POLL_S):
                _read(key.data, selector, listen)
            poll()


def _start(rank: int, job: Job, stack: ExitStack) -> _Process:
    errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (the stack closes it)
    stack.enter_context(errors)
    platform = get_platform("cpu")
    threads = max(1, len(os.sched_getaffinity(0)) // job.layout.world_size)
    # The kernel ends it when this process ends, however that comes about.
    argv = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid())]
    argv += [sys.executable, "-m", "megarl.convert.worker", str(rank)]
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env={**os.environ, **platform.env, "OMP_NUM_THREADS": str(threads)},
    )
    stack.callback(_end, process)
    assert process.stdin is not None
    # One that has ended already does not hear its job: how it ended is for `_read` to say.
    with suppress(BrokenPipeError), process.stdin as job_of_it:
        job_of_it.write(job.dump().encode() + b"\n")
    return _Process(rank, process, errors)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _read(each: _Process, selector: selectors.BaseSelector, listen: Callable[[Message], None]) -> None:
    """What one rank has to say; at its end, whether it ended well."""
    assert each.process.stdout is not None
    data = os.read(each.process.stdout.fileno(), 1 << 16)
    for message in map(parse_message, each.lines(data)):
        if message.kind == "error":
            each.told.append(message)
        else:
            listen(message)
    if data:
        return
    selector.unregister(each.process.stdout)
    code = each.process.wait()
    for message in each.told:
        raise UserError(message.text) if message.code == UserError.exit_code else MegarlError(message.text)
    if code:
        raise WorkerDiedError(
            f"Rank {each.rank} of the conversion ended: {ending_of(code)}; nothing was kept. Its last lines:\n{each.tail()}"
        )


def _late(processes: list[_Process], timeout_s: float) -> str:
    alive = [each for each in processes if each.process.poll() is None]
    tails = "\n".join(f"rank {each.rank}: {each.tail() or 'said nothing'}" for each in alive)
    return (
        f"The conversion was not done after {timeout_s:g} s and was ended; nothing was kept. Still at work were the ranks "
        f"{[each.rank for each in alive]}. Give it longer with --timeout. Their last lines:\n{tails}"
    )


def folder_bytes(folder: Path) -> int:
    """Bytes in the files below a folder now; files may come and go meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue  # renamed between the two calls
    return total
