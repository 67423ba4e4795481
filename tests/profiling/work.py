"""What ranks of a profile do in its tests; a module that a fresh process can import."""

from __future__ import annotations

import os
import sys
import time

from megarl.profiling.job import Job, Measured, Raw

STUCK_S = 600.0


def job(deadline_s: float, world_size: int = 2) -> Job:
    return Job("cpu", "float32", (), (), world_size, 0, deadline_s)


def own_number(rank: int, asked: Job) -> Measured:
    """The first answers last."""
    time.sleep(0.5 * (rank == 0))
    return Measured(asked.world_size, Raw(float(rank), 0.0, 0.0, {}, {}), ())


def first_waits_for_second_which_fails(rank: int, asked: Job) -> None:
    if rank == 1:
        raise ValueError("no memory left")
    time.sleep(STUCK_S)


def stuck(rank: int, asked: Job) -> None:
    time.sleep(STUCK_S)


def second_dies(rank: int, asked: Job) -> None:
    if rank == 1:
        os.write(1, b"no room for me\n")
        os._exit(3)
    time.sleep(STUCK_S)


def named_and_stuck(rank: int, asked: Job) -> None:
    """The file of what it says is the pipe that its parent writes to."""
    sys.stdout.write(f"{os.getpid()}\n")
    sys.stdout.flush()
    time.sleep(STUCK_S)
