"""Runs the ranks of a profile, each in a fresh process, and ends them. Without torch."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from megarl.core.errors import DeadlineError, WorkerDiedError
from megarl.profiling.job import Job, Measured
from megarl.profiling.worker import measure


def measure_ranks(job: Job) -> Measured:
    """What the first rank measured. Raises WorkerDiedError and DeadlineError, which name how many ranks there were."""
    with ProcessPoolExecutor(job.world_size, mp_context=get_context("spawn")) as pool:
        ranks = [pool.submit(measure, rank, job) for rank in range(job.world_size)]
        try:
            first, *_ = [rank.result(job.deadline_s) for rank in ranks]
            return first
        except TimeoutError:
            # Their collectives have the same deadline, and end by themselves.
            raise DeadlineError(
                f"A profile of {job.world_size} ranks was not done after {job.deadline_s:g} s. Is the machine busy?"
            ) from None
        except BrokenProcessPool as error:
            raise WorkerDiedError(f"A rank of a profile of {job.world_size} ranks died: {error}") from error
