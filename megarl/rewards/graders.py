"""Grader processes with a deadline for each grade: whatever a reward function does, the run goes on.

A function that hangs is killed with its process, one that raises or crashes is a counted failure, and neither is a
reward of zero. Requests travel in batches whose size follows how long a grade takes, so that quick graders cost little
and slow ones do not queue behind each other. Not for the functions themselves (math.py, exact.py, the user's own).
"""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from megarl.core.end_signals import ending_of
from megarl.core.errors import MegarlError, UserError, WorkerDiedError
from megarl.rewards.grade import Grade, Item, failed
from megarl.rewards.patience import Patience, UnderWay
from megarl.rewards.printed import Printed
from megarl.rewards.worker import HEADER, READY, frame

# A process is sent about so many seconds of work ahead, at most so many grades.
AHEAD_S = 0.02
MOST_AHEAD = 64
ROUNDS = 3  # losses in a row of each process, after which what waits is given up
CLOSE_TIMEOUT_S = 10.0
# What ends a process from outside: an administrator, or the kernel short of memory. It says little of the response.
FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)


@dataclass(frozen=True)
class _Job:
    """One request on its way. asked_at: by `time.monotonic`. again: a process was killed from outside while it was at it."""

    payload: bytes
    future: asyncio.Future[Grade]
    row: str
    asked_at: float
    again: bool = False

    def finish(self, grade: Grade) -> None:
        """Hand over the grade, unless the caller has given up."""
        if not self.future.done():
            self.future.set_result(grade)


class _Worker(asyncio.SubprocessProtocol):
    """One grader process, seen from the pool. Grades come back in the order in which they were sent."""

    def __init__(self, pool: GraderPool, timeout_s: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.greeting: asyncio.Future[MegarlError | None] = self.loop.create_future()
        self.gone: asyncio.Future[None] = self.loop.create_future()
        self.jobs: deque[_Job] = deque()
        self.serving = False  # between its greeting and its retirement
        self._retired = False
        self._pool = pool
        self._timeout_s = timeout_s
        self._transport: asyncio.SubprocessTransport | None = None
        self._buffer = bytearray()
        self._head_since = 0.0  # when the first of the jobs can have begun, at the latest
        self._mean_s = AHEAD_S
        self._timer: asyncio.TimerHandle | None = None

    @property
    def room(self) -> int:
        """How many more jobs to send now."""
        if not self.serving:
            return 0
        return max(1, min(MOST_AHEAD, int(AHEAD_S / max(self._mean_s, 1e-6)))) - len(self.jobs)

    @property
    def ending(self) -> str:
        """How the process ended, for messages."""
        code = self._transport.get_returncode() if self._transport else None
        return "its pipe closed" if code is None else ending_of(code)

    @property
    def killed(self) -> bool:
        """Whether it was ended from outside."""
        return self._transport is not None and self._transport.get_returncode() in FROM_OUTSIDE

    @property
    def under_way(self) -> UnderWay | None:
        """What the process is at."""
        return UnderWay(self.jobs[0].row, self.loop.time() - self._head_since) if self.jobs else None

    def send(self, jobs: list[_Job]) -> None:
        """Queue jobs for grading."""
        assert self._transport is not None
        # Casts, not checks: other event loops' transports (uvloop's) do not inherit from asyncio's.
        pipe = cast("asyncio.WriteTransport", self._transport.get_pipe_transport(0))
        if not self.jobs:
            self._head_since = self.loop.time()
        self.jobs.extend(jobs)
        pipe.write(frame([job.payload for job in jobs]))
        if self._timer is None:
            self._timer = self.loop.call_later(self._timeout_s, self._check_deadline)

    def retire(self) -> None:
        """Kill the process, and everything that the user's function started in its session."""
        self.serving = False
        self._retired = True
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            _kill_group(self._transport.get_pid())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the process runs."""
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes | bytearray) -> None:
        """asyncio: results arrived."""
        if self._retired:
            return
        self._buffer += data
        results = self._frames()
        if results and not self.greeting.done():
            self._greet(*results.pop(0))
        if results:
            now = self.loop.time()
            self._mean_s += ((now - self._head_since) / len(results) - self._mean_s) * 0.5
            self._head_since = now
            for grade in results:
                job = self.jobs.popleft()
                job.finish(grade)
                self._pool.patience.graded(job.row)
        self._pool.pump_soon()

    def process_exited(self) -> None:
        """asyncio: the process ended; what it left behind would hold its pipes open."""
        if self._transport is not None:
            _kill_group(self._transport.get_pid())

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the process ended, and everything that it wrote has been read."""
        if not self.greeting.done():
            self.greeting.set_result(WorkerDiedError(f"a grader process ended while it started: {self.ending}"))
        elif self.serving:
            self._pool.lost(self, f"error: the grader process died: {self.ending}")
        if not self.gone.done():
            self.gone.set_result(None)

    def _greet(self, word: str, reason: str) -> None:
        self.serving = word == READY
        self.greeting.set_result(None if self.serving else UserError(reason))

    def _frames(self) -> list[Any]:
        values = []
        while len(self._buffer) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._buffer)
            end = HEADER.size + size
            if len(self._buffer) < end:
                break
            values.append(pickle.loads(self._buffer[HEADER.size : end]))
            del self._buffer[:end]
        return values

    def _check_deadline(self) -> None:
        """Called at the earliest moment at which the first job can be late."""
        self._timer = None
        if not self.jobs:
            return
        left = self._head_since + self._timeout_s - self.loop.time()
        if left > 0:
            self._timer = self.loop.call_later(left, self._check_deadline)
        else:
            self._pool.lost(self, "timeout")


class GraderPool:
    """`workers` processes that grade with the reward function `fn`, each grade within `timeout_s` seconds."""

    def __init__(
        self,
        fn: str,
        workers: int,
        timeout_s: float,
        *,
        key: str = "reward.fn",
        folder: Path | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        """Starts nothing yet. key: where the function stands in the recipe, for messages.

        folder: where the processes run and look for the user's modules; default: here.
        """
        self._fn = fn
        self._key = key
        self._num_workers = workers
        self._timeout_s = timeout_s
        self._folder = folder
        self._start_timeout_s = start_timeout_s
        self._starting: asyncio.Task[None] | None = None
        self._up = False
        self._workers: list[_Worker] = []
        self._replacing: set[asyncio.Task[None]] = set()
        self._queue: deque[_Job] = deque()
        self.patience = Patience(ROUNDS * workers)
        self._printed: Printed | None = None
        self._pumping = False
        self._broken: MegarlError | None = None

    async def start(self) -> None:
        """Start the processes and wait until all have imported the function; later calls wait for the first.

        Raises UserError where the function cannot be resolved, WorkerDiedError where a process does not come up.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._start_all())
        await asyncio.shield(self._starting)

    async def grade(self, item: Item) -> Grade:
        """Grade one response. The deadline counts from when a process takes it up, not while it waits its turn.

        Raises what `start` raises, also when a process that had to be replaced cannot be.
        """
        if not self._up:
            await self.start()
        if self._broken is not None:
            raise self._broken
        payload = pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL)
        job = _Job(payload, asyncio.get_running_loop().create_future(), item.row or str(id(payload)), time.monotonic())
        self._queue.append(job)
        self.pump_soon()
        return await job.future

    def oldest(self) -> UnderWay | None:
        """What a process has been at for longest."""
        at = [worker.under_way for worker in self._workers if worker.under_way is not None]
        return max(at, key=lambda each: each.for_s, default=None)

    async def close(self) -> None:
        """End all processes, and what the functions started; grades under way raise. Returns when they are gone."""
        tasks = [task for task in (self._starting, *self._replacing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._break(MegarlError("the grader pool is closed"))
        await self._end_workers()
        if self._printed is not None:
            self._printed.close()

    async def __aenter__(self) -> GraderPool:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def pump_soon(self) -> None:
        """Send what waits, once, after everything that is about to be queued in this turn of the event loop."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def lost(self, worker: _Worker, failure: str) -> None:
        """Replace a process: the grade that it was at has failed, those behind it go to the others.

        One that was killed from outside has not failed the first time: others try it once more.
        """
        jobs = list(worker.jobs)
        worker.jobs.clear()
        if jobs and worker.killed and not jobs[0].again:
            self._queue.extendleft(reversed([replace(jobs[0], again=True), *jobs[1:]]))
            self.pump_soon()
            jobs = []
        worker.retire()
        if jobs:
            jobs[0].finish(failed(failure))
            self.patience.lost(jobs[0].row)
            self._queue.extendleft(reversed(jobs[1:]))
            self._give_up()
        if self._broken is None:
            task = asyncio.get_running_loop().create_task(self._replace())
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)

    def _give_up(self) -> None:
        """Fail those that wait for what would only be lost as well."""
        tried: deque[_Job] = deque()
        for job in self._queue:
            refusal = self.patience.refusal(job.row, job.asked_at)
            if refusal is None:
                tried.append(job)
            else:
                job.finish(failed(refusal))
        self._queue = tried

    def _pump(self) -> None:
        self._pumping = False
        free = [worker for worker in self._workers if worker.room > 0]
        for index, worker in enumerate(free):
            share = math.ceil(len(self._queue) / (len(free) - index))
            if jobs := [self._queue.popleft() for _ in range(min(worker.room, share))]:
                worker.send(jobs)

    async def _start_all(self) -> None:
        self._printed = await Printed.open(self._key)
        outcomes = await asyncio.gather(*(self._spawn() for _ in range(self._num_workers)), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                await self._end_workers()
                self._printed.close()
                raise outcome
        self._up = True

    async def _replace(self) -> None:
        try:
            await self._spawn()
        except MegarlError as error:
            self._break(error)
        else:
            self.pump_soon()

    async def _spawn(self) -> None:
        """Start one process and wait until it is ready."""
        command = [sys.executable, "-m", "megarl.rewards.worker"]
        command += ["--fn", self._fn, "--key", self._key, "--parent", str(os.getpid())]
        worker = _Worker(self, self._timeout_s)
        assert self._printed is not None
        try:
            await asyncio.get_running_loop().subprocess_exec(
                lambda: worker,
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._printed.write_end,
                cwd=self._folder,
                start_new_session=True,  # so that Ctrl-C is the run's to handle, and the whole group can be killed
            )
        except OSError as error:
            raise WorkerDiedError(f"a grader process could not be started: {error}") from error
        self._workers.append(worker)
        worker.gone.add_done_callback(lambda _: self._workers.remove(worker))
        try:
            async with asyncio.timeout(self._start_timeout_s):
                problem = await worker.greeting
        except TimeoutError as error:
            worker.retire()
            raise WorkerDiedError(
                f"a grader process for {self._key}={self._fn!r} was not ready after {self._start_timeout_s:g} s: "
                "does its module do long work while it is imported?"
            ) from error
        if problem is not None:
            raise problem

    async def _end_workers(self) -> None:
        """Kill all processes and wait until they are gone."""
        workers = list(self._workers)
        for worker in workers:
            worker.retire()
        if workers:
            await asyncio.wait([worker.gone for worker in workers], timeout=CLOSE_TIMEOUT_S)

    def _break(self, error: MegarlError) -> None:
        """Refuse all grades from now on, those under way included."""
        self._broken = error
        for job in (*self._queue, *(job for worker in self._workers for job in worker.jobs)):
            if not job.future.done():
                job.future.set_exception(error)
        self._queue.clear()


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return  # nothing of it is left
