"""Sandboxes for code that a model wrote, from asyncio:

    async with SandboxPool(Limits(memory_bytes=256 * MIB), size=8) as pool:
        result = await pool.run("print(6 * 7)")

They are started ahead and wait, so that a run begins at once; each is used once. A process of its own keeps them (keeper.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import sys
from collections.abc import Mapping
from types import TracebackType

from megarl.core.end_signals import ending_of
from megarl.core.errors import DeadlineError, MegarlError, UserError, WorkerDiedError
from megarl.core.janitor import RUN_ID_VARIABLE
from megarl.sandbox import wire
from megarl.sandbox.job import Check, InForce, Job, Limits, Result, check_job

START_S = 90.0  # for the keeper and its first sandbox
CLOSE_S = 20.0
ENDING_S = 2.0
SLACK_S = 60.0  # what a job may take beyond its own seconds and those before it
PASSED_ON = (
    "PATH",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "TMPDIR",
    RUN_ID_VARIABLE,
)  # what the keeper gets of the environment


class SandboxPool:
    """Up to `size` sandboxes at once; further runs wait their turn."""

    def __init__(self, limits: Limits | None = None, size: int | None = None) -> None:
        """Starts nothing yet. limits: of each sandbox. size: default: twice the cores. Raises UserError."""
        self.limits = limits or Limits()
        self.size = 2 * len(os.sched_getaffinity(0)) if size is None else size
        if self.size < 1:
            raise UserError(f"a pool of {size} sandboxes runs nothing; size has to be at least 1")
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._in_force: InForce | None = None
        self._waiting: dict[int, asyncio.Future[Result]] = {}
        self._seconds: dict[int, float] = {}  # of each job that is asked for
        self._numbers = itertools.count()
        self._broken: MegarlError | None = MegarlError("the sandbox pool was not started")

    @property
    def in_force(self) -> InForce:
        """How the limits are held here. Known once the pool has started."""
        assert self._in_force is not None, "the pool was not started"
        return self._in_force

    async def start(self) -> None:
        """Start the keeper, and wait for its first sandbox.

        Raises UserError where this machine makes none (bubblewrap is missing, the kernel forbids it), and what to do.
        """
        try:
            async with asyncio.timeout(START_S):
                reader = await self._spawn()
                said = await wire.read(reader)
        except TimeoutError:
            await self._end()
            raise DeadlineError(f"no sandbox was ready {START_S:g} s after the pool was started") from None
        except BaseException:
            await self._end()
            raise
        if isinstance(said, wire.Ready):
            self._in_force = said.in_force
            self._broken = None
            self._listening = asyncio.create_task(self._listen(reader))
            return
        await self._end()
        if isinstance(said, wire.Refused):
            raise UserError(said.reason)
        raise WorkerDiedError(f"the keeper of the sandboxes ended while it started: {self._ending()}")

    async def run(
        self,
        code: str,
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        timeout_s: float | None = None,
        checks: tuple[Check, ...] = (),
    ) -> Result:
        """Run a Python program in a sandbox of its own.

        files: by path below the folder that it is started in. timeout_s: wall-clock, from when it has a sandbox; default:
        the limits'. checks: run after it. Cancelled, the sandbox is killed.
        Raises UserError (a job that no sandbox takes), MegarlError where no sandbox comes up any more.
        """
        if self._broken is not None:
            raise self._broken
        seconds = self.limits.timeout_s if timeout_s is None else timeout_s
        found = {name: _bytes(data) for name, data in (files or {}).items()}
        job = Job(code, _bytes(stdin), found, seconds, checks)
        check_job(job, self.limits)
        number = next(self._numbers)
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting[number], self._seconds[number] = future, seconds
        patience = SLACK_S + sum(self._seconds.values()) / self.size + seconds
        self._say(wire.Run(number, job))
        try:
            async with asyncio.timeout(patience):
                return await future
        except TimeoutError:
            raise DeadlineError(
                f"the keeper of the sandboxes (pid {self._pid()}) said nothing of a job for {patience:.0f} s"
            ) from None
        finally:
            if not future.done() or future.cancelled():
                self._say(wire.Cancel(number))
            del self._waiting[number], self._seconds[number]

    async def close(self) -> None:
        """End all sandboxes and the keeper; runs under way raise. Returns when they are gone."""
        self._break(MegarlError("the sandbox pool is closed"))
        await self._end()

    async def __aenter__(self) -> SandboxPool:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _spawn(self) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "megarl.sandbox.keeper", "--channel", str(theirs.fileno()), "--owner", str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={name: os.environ[name] for name in PASSED_ON if name in os.environ},
                start_new_session=True,  # so that Ctrl-C is the owner's to handle
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._say(wire.Begin(self.limits, self.size))
        return reader

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Hand over results, until the keeper is gone."""
        while (said := await wire.read(reader)) is not None:
            future = self._waiting.get(said.number)
            if future is None or future.done():
                continue  # nobody waits for it any more
            if said.result is not None:
                future.set_result(said.result)
            else:
                future.set_exception(MegarlError(said.failure))
        if self._broken is None:
            assert self._process is not None
            with contextlib.suppress(TimeoutError):  # its socket closes a moment before it can be waited for
                async with asyncio.timeout(ENDING_S):
                    await self._process.wait()
            self._break(WorkerDiedError(f"the keeper of the sandboxes ended: {self._ending()}"))

    async def _end(self) -> None:
        """The keeper ends once its socket closes; it is killed where it does not."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])
        if self._writer is not None:
            self._writer.close()
        if self._process is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def _break(self, error: MegarlError) -> None:
        """Refuse all runs from now on, those under way included."""
        self._broken = error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    def _say(self, record: object) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(wire.frame(record))

    def _pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def _ending(self) -> str:
        code = self._process.returncode if self._process is not None else None
        return "its socket closed" if code is None else ending_of(code)


def _bytes(data: str | bytes) -> bytes:
    return data.encode("utf-8", "replace") if isinstance(data, str) else data
