"""What became of a submitted run: `megarl status`, `megarl logs`, `megarl cancel`, and the exit code of its job."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable
from pathlib import Path

from megarl.core.errors import MegarlError, UserError
from megarl.launch import slurm
from megarl.launch.ray_jobs import ENDED, RayJobs, TokenError
from megarl.launch.record import Submission, find_submission, last_exit_code, reading, steps_done

POLL_S = 0.3
SILENT_S = 600.0  # longest time that SLURM may fail to say so
ASK_EVERY_S = 3.0  # how often SLURM is asked whether a job still runs, while its log is shown

Write = Callable[[str], object]


def is_alive(submission: Submission) -> bool:
    """Whether the job has still to end; one that its scheduler has forgotten has ended.

    Raises TokenError where a Ray cluster is there and does not say, MegarlError where a scheduler fails to answer.
    """
    if submission.kind == "slurm":
        state = slurm.state_of(submission.job, submission.address)
        return state is not None and state.alive
    try:
        return RayJobs(submission.address).state(submission.job)[0] not in ENDED
    except TokenError:
        raise
    except UserError:
        return False  # that cluster is gone, and the job with it


def describe(run: Path, submission: Submission) -> str:
    """The state of a run's job in its scheduler's words."""
    if submission.kind == "slurm":
        state = slurm.state_of(submission.job, submission.address)
        if state is None:
            left = last_exit_code(run, submission.job)
            return "ended, and SLURM has forgotten it" + ("" if left is None else f", exit code {left}")
        code = f", exit code {state.exit_code}" if not state.alive else ""
        return state.describe() + code
    name, ended_with = RayJobs(submission.address).state(submission.job)
    return name if ended_with is None else f"{name}, exit code {ended_with}"


def status(run: Path) -> tuple[str, str, str]:
    """Job, state and steps done of a run, for people."""
    submission = find_submission(run)
    steps = steps_done(run)
    return f"{submission.kind} {submission.job}", describe(run, submission), "-" if steps is None else str(steps)


def show_logs(run: Path, *, follow: bool, write: Write) -> None:
    """Hand on what the job of a run printed; follow: until it has ended."""
    submission = find_submission(run)
    if submission.kind == "ray":
        jobs = RayJobs(submission.address)
        if follow:
            jobs.follow(submission.job, write)
        else:
            write(jobs.logs(submission.job))
        return
    log = Path(submission.log)
    if follow:
        follow_file(log, patiently(lambda: is_alive(submission)), write)
    elif log.is_file():
        with reading(log):
            text = log.read_text(errors="replace")
        write(text)
    else:
        raise UserError(f"{log} is not there yet: {describe(run, submission)}.")


def patiently(alive: Callable[[], bool], silent_s: float = SILENT_S) -> Callable[[], bool]:
    """Whether the job has still to end, by a scheduler that may fail to answer for a while, as one does that is started anew."""
    heard = time.monotonic()

    def asked() -> bool:
        nonlocal heard
        try:
            found = alive()
        except UserError:
            raise
        except MegarlError:
            if time.monotonic() - heard > silent_s:
                raise
            return True
        heard = time.monotonic()
        return found

    return asked


def follow_file(file: Path, alive: Callable[[], bool], write: Write, ask_every_s: float = ASK_EVERY_S) -> None:
    """Hand on what a file says and will say, as long as its writer lives."""
    position, asked, goes_on = 0, -ask_every_s, True
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # the last character may be half written
    while True:
        if time.monotonic() - asked >= ask_every_s:
            goes_on, asked = alive(), time.monotonic()
        if file.is_file():
            with reading(file), file.open("rb") as log:
                log.seek(position)
                new = log.read()
            position += len(new)
            if text := decoder.decode(new, final=not goes_on):
                write(text)
        if not goes_on:
            return
        time.sleep(POLL_S)


def exit_code(run: Path) -> int:
    """Of a run's job that has ended: its driver's. Raises UserError where its scheduler has forgotten it."""
    submission = find_submission(run)
    if submission.kind == "ray":
        return RayJobs(submission.address).exit_code(submission.job)
    state = slurm.state_of(submission.job, submission.address)
    if state is None:
        left = last_exit_code(run, submission.job)
        if left is None:
            raise UserError(f"SLURM does not know job {submission.job} any more; its log is {submission.log}.")
        return left
    return state.exit_code or int(state.name != "COMPLETED")


def cancel(run: Path) -> str:
    """End the job of a run; returns what was done, for people.

    Raises UserError where a Ray cluster cannot be asked: its job may well go on.
    """
    submission = find_submission(run)
    ended = f"{submission.kind} job {submission.job} has ended already"
    if submission.kind == "slurm":
        if not is_alive(submission):
            return ended
        slurm.cancel(submission.job, submission.address)
    else:
        jobs = RayJobs(submission.address)
        if jobs.state(submission.job)[0] in ENDED:
            return ended
        jobs.stop(submission.job)
    return f"{submission.kind} job {submission.job} is being ended"
