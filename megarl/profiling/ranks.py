"""Runs the ranks of a profile, each in a fresh process, and ends them. Without torch."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from megarl.core.end_signals import ending_of
from megarl.core.errors import DeadlineError, WorkerDiedError
from megarl.core.log_tail import own_words
from megarl.profiling.job import Job, Measured
from megarl.profiling.worker import measure
from megarl.sandbox.kernel import die_with_parent


def measure_ranks(job: Job, log: Path) -> Measured:
    """What the first rank measured. No rank outlives this. log: a file for what ranks print, behind what it has.

    Raises what the first rank to fail raised; WorkerDiedError and DeadlineError, which name how many ranks there were.
    """
    context, ranks = get_context("spawn"), dict[Connection, SpawnProcess]()
    with ExitStack() as stack:
        for rank in range(job.world_size):
            answer, theirs = context.Pipe(duplex=False)
            ranks[answer] = context.Process(target=_rank, args=(theirs, os.getpid(), measure, rank, job, log))
            ranks[answer].start()
            stack.callback(_end, answer, ranks[answer])
            theirs.close()  # so that the rank's death is the end of the pipe
        first, *_ = _answers(job, ranks, log)
        return first


def _answers(job: Job, ranks: dict[Connection, SpawnProcess], log: Path) -> list[Measured]:
    """Of all ranks, in their order; the first one that fails ends it, for the others wait for that one."""
    end, found = time.monotonic() + job.deadline_s, dict[Connection, Measured]()
    while len(found) < len(ranks):
        ready = connection.wait(ranks.keys() - found.keys(), max(0.0, end - time.monotonic()))
        if not ready:
            raise DeadlineError(
                f"A profile of {job.world_size} ranks was not done after {job.deadline_s:g} s. Is the machine busy?{_said(log)}"
            )
        for answer in ready:
            assert isinstance(answer, Connection)
            try:
                measured, error = answer.recv()
            except EOFError:
                ranks[answer].join()
                code = ranks[answer].exitcode
                assert code is not None, "it was waited for"
                raise WorkerDiedError(
                    f"A rank of a profile of {job.world_size} ranks died: {ending_of(code)}{_said(log)}"
                ) from None
            if error is not None:
                raise error
            found[answer] = measured
    return [found[answer] for answer in ranks]


def _said(log: Path) -> str:
    return f"\n--- end of what its ranks said\n{own_words(log)}"


def _rank(
    answer: Connection, parent: int, work: Callable[[int, Job], Measured], rank: int, job: Job, log: Path
) -> None:
    """What a rank's process does. The kernel ends it where the process that asked for it is killed."""
    die_with_parent()
    if os.getppid() != parent:
        return  # it has ended already
    with log.open("ab") as file:  # Megatron and gloo have much to say of each rank
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    try:
        found: tuple[Measured | None, Exception | None] = work(rank, job), None
    except Exception as error:
        error.add_note(traceback.format_exc())
        found = None, error
    answer.send(found)


def _end(answer: Connection, process: SpawnProcess) -> None:
    process.kill()
    process.join()
    answer.close()
