"""The process that keeps a pool's sandboxes: starts them ahead, gives each one job, ends them. `python -m megarl.sandbox.keeper`.

It is a process of its own so that it may be small (each sandbox is forked of it), may be root's with mounts that nobody else
sees, inherits whatever a sandbox leaves, and cleans up when the pool's process is gone, however that ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from megarl.core.errors import UserError
from megarl.core.log import get_logger
from megarl.sandbox import bubblewrap, cgroups, kernel, refusal, seccomp, watch, wire
from megarl.sandbox.cell import Answer, Cell, Judged, Settings, StartError
from megarl.sandbox.job import BESIDE, Check, Checked, InForce, Job, Limits, Result

log = get_logger(__name__)

NOBODY = 65534
LOOK_S = 0.02  # between looks at what running sandboxes use; longer where a look takes long
LOOK_SHARE = 0.2  # of a core, at most, that looking takes
FAILURES = 3  # starts in a row that fail, after which jobs that wait are told
AGAIN_S = 0.5
END_S = 15.0  # for all sandboxes together, when the keeper ends


class Children:
    """The processes that this one has to wait for: those that it started, and orphans below them."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[int]] = {}

    def expect(self, pid: int) -> asyncio.Future[int]:
        """A future of the exit status of a child, as a shell has it: 128 + the signal's number."""
        self._waiting[pid] = asyncio.get_running_loop().create_future()
        return self._waiting[pid]

    def reap(self) -> None:
        """Take note of all that have ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if (future := self._waiting.pop(pid, None)) is not None and not future.done():
                future.set_result(code if code >= 0 else 128 - code)


class Keeper:
    """Keeps `size` sandboxes, those that wait and those that run together, and one more for each check that runs apart."""

    def __init__(
        self, settings: Settings, groups: cgroups.Groups | None, size: int, writer: asyncio.StreamWriter
    ) -> None:
        self._settings = settings
        self._groups = groups
        self._size = size
        self._apart = 0  # checks that run apart from their code
        self._writer = writer
        self._children = Children()
        self._warm: asyncio.Queue[Cell | StartError] = asyncio.Queue()
        self._wanted = 0  # by jobs that have none yet
        self._starting = 0
        self._at_once = asyncio.Semaphore(max(2, len(os.sched_getaffinity(0))))
        self._cells: set[Cell] = set()
        self._running: set[Cell] = set()
        self._jobs: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures = 0
        self._number = 0
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._children.reap)

    async def first(self) -> None:
        """Start the first one, alone. Raises StartError."""
        await self._warm.put(await self._start())

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Do what the pool asks for, until it is gone."""
        self._stock()
        looking = asyncio.create_task(self._look())
        while (said := await wire.read(reader)) is not None:
            if isinstance(said, wire.Run):
                task = asyncio.create_task(self._serve(said.number, said.job))
                self._jobs[said.number] = task
                task.add_done_callback(functools.partial(self._forget, said.number))
            elif isinstance(said, wire.Cancel) and said.number in self._jobs:
                self._jobs[said.number].cancel()
        looking.cancel()

    async def close(self) -> None:
        """End all sandboxes; returns when they are gone, within a deadline."""
        self._size = -(10**9)  # no more are started
        for task in (*self._jobs.values(), *self._tasks):
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await asyncio.gather(*self._jobs.values(), *self._tasks, return_exceptions=True)
                await asyncio.gather(*(cell.close() for cell in tuple(self._cells)), return_exceptions=True)
                # One that was killed while it started may have left a child, which is now this process's.
                while left := watch.children(os.getpid()):
                    for pid in left:
                        os.kill(pid, signal.SIGKILL)
                    await asyncio.sleep(0.01)
                while self._groups is not None and not self._groups.removed():
                    await asyncio.sleep(0.01)

    async def _serve(self, number: int, job: Job) -> None:
        """Run one job in the next sandbox that is ready, and say what came of it."""
        try:
            self._say(wire.Done(number, await self._run(await self._take(), job)))
        except StartError as error:
            self._say(wire.Done(number, None, refusal.explain(str(error))))

    def _forget(self, number: int, _: object) -> None:
        del self._jobs[number]

    async def _run(self, cell: Cell, job: Job, answer: Answer | None = None) -> Result:
        self._running.add(cell)
        try:
            return await cell.run(job, self._judge, answer)
        finally:
            self._running.discard(cell)
            self._later(self._retire(cell))

    async def _judge(self, check: Check, answer: Answer, timeout_s: float) -> Judged:
        """Run a check apart from the code that it calls. Raises StartError."""
        self._apart += 1
        try:
            async with self._at_once:  # none that is ready: jobs that wait for one may be as many as there are
                cell = await self._start()
            result = await self._run(cell, Job(check.source, timeout_s=timeout_s, asks=check.names), answer)
        finally:
            self._apart -= 1
        beside = result.exit_code == BESIDE
        return Judged(None if beside else Checked(result.ended == "ok", result.stderr), result.seconds)

    async def _take(self) -> Cell:
        """The next sandbox that is ready. Raises StartError where none comes up."""
        self._wanted += 1
        try:
            while True:
                found = await self._warm.get()
                if isinstance(found, StartError):
                    raise found
                if not found.exited.done():
                    return found
                self._later(self._retire(found))  # somebody killed it while it waited
        finally:
            self._wanted -= 1

    async def _start(self) -> Cell:
        """A new sandbox that is ready. Raises StartError."""
        self._number += 1
        try:
            group = self._groups.make(self._number, self._settings.limits) if self._groups is not None else None
            cell = Cell(self._settings, group, self._children.expect)
        except OSError as error:
            raise StartError(f"{type(error).__name__}: {error}") from error
        self._cells.add(cell)
        try:
            await cell.ready()
        except StartError:
            await self._end(cell)
            raise
        except asyncio.CancelledError:  # the job that it was for is given up
            self._later(self._retire(cell))
            raise
        return cell

    def _stock(self) -> None:
        """Start as many as there should be."""
        while len(self._cells) + self._starting < self._size + self._apart:
            self._starting += 1
            self._later(self._add())

    async def _add(self) -> None:
        try:
            async with self._at_once:
                self._starting -= 1
                cell = await self._start()
        except StartError as error:
            self._failures += 1
            log.warning("a sandbox did not start: %s", error)
            # Where nobody waits, whoever comes later would be told of what may have passed by then.
            if self._failures >= FAILURES and self._warm.qsize() < self._wanted:
                self._warm.put_nowait(error)
            await asyncio.sleep(AGAIN_S)
            self._stock()
            return
        self._failures = 0
        self._warm.put_nowait(cell)

    async def _retire(self, cell: Cell) -> None:
        await self._end(cell)
        self._stock()

    async def _end(self, cell: Cell) -> None:
        if cell in self._cells:
            await cell.close()
            self._cells.discard(cell)

    async def _look(self) -> None:
        """Look at what running sandboxes use, again and again."""
        while True:
            began = time.monotonic()
            for cell in tuple(self._running):
                cell.look()
            await asyncio.sleep(max(LOOK_S, (time.monotonic() - began) / LOOK_SHARE))

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _say(self, record: object) -> None:
        self._writer.write(wire.frame(record))


def lowest_user() -> int | None:
    """Who sandboxes run as: what root becomes; None where this process has no more rights than others anyway."""
    if os.geteuid() != 0:
        return None
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        inside, _, count = map(int, line.split())
        if inside <= NOBODY < inside + count:
            return NOBODY
    return None  # root of a user namespace that holds nobody else: outside it is an ordinary user


def seen_by(user: int | None, python: bubblewrap.Interpreter) -> bubblewrap.Interpreter:
    """The interpreter, at a place where that user can read it. Raises UserError.

    Root's own may be below /root. Then it is mounted a second time, where only this process and its children see it.
    """
    if user is None or all(_open_to_all(path) for path in python.sources()):
        return python
    try:
        kernel.own_mounts()
        place = _unused_folder(python)
        kernel.mount_memory(str(place))
        staged = bubblewrap.Interpreter(place / "python3", place / "prefix", python.library)
        staged.file.touch()
        kernel.mount_again(str(python.file), str(staged.file))
        for name in python.folders():
            (staged.prefix / name).mkdir(parents=True)
            kernel.mount_again(str(python.prefix / name), str(staged.prefix / name))
    except OSError as error:
        raise UserError(
            f"sandboxes run as an ordinary user, who may not read the interpreter below {python.prefix}, and it cannot be "
            f"mounted elsewhere: {error}. Use an interpreter outside of root's home (below /usr, /opt, ...), or start megarl "
            "as an ordinary user."
        ) from error
    return staged


def _unused_folder(python: bubblewrap.Interpreter) -> Path:
    """A folder that nothing is lost with when something is mounted over it, for this process and its children."""
    used = (python.prefix, python.file, Path(sys.prefix), Path(__file__).resolve(), Path.cwd())
    for name in ("/mnt", "/media", "/srv", tempfile.gettempdir()):
        place = Path(name)
        if place.is_dir() and not any(path.is_relative_to(place) for path in used):
            return place
    raise OSError(
        "Python and megarl lie below each of /mnt, /media, /srv and the folder for temporary files that there is"
    )


def _open_to_all(path: Path) -> bool:
    """Whether anybody may read a file or folder, and pass through all above it."""
    try:
        return bool(path.stat().st_mode & 0o004) and all(above.stat().st_mode & 0o001 for above in path.parents)
    except OSError:
        return False


def prepare(limits: Limits) -> tuple[Settings, cgroups.Groups | None, InForce]:
    """All that can be settled before the first sandbox. Raises UserError."""
    bwrap, version = bubblewrap.find()
    bubblewrap.check_kernel()
    user = lowest_user()
    groups = cgroups.find()
    if os.geteuid() == 0 and user is None and groups is None:
        raise UserError(
            "megarl runs as root of a user namespace that holds no other user and may make no control groups: nothing would "
            "bound how many processes a sandbox has. Start it as an ordinary user, or give the namespace more user ids "
            "(/etc/subuid)."
        )
    settings = Settings(
        bwrap=bwrap,
        python=seen_by(user, bubblewrap.Interpreter.own()),
        runner=Path(__file__).with_name("runner.py").read_text(),
        filter=seccomp.program(),
        limits=limits,
        user=user,
        by_group=groups is not None,
    )
    memory = f"cgroup v{groups.version}" if groups is not None else "watched"
    return settings, groups, InForce(memory, os.getuid() if user is None else user, version)


async def keep(channel: int, owner: int) -> None:
    """Keep sandboxes for a pool until it is gone. channel: the socket to it. owner: its process."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=channel))
    # A process that the owner forked may hold the socket open after it.
    with contextlib.suppress(ProcessLookupError):
        asyncio.get_running_loop().add_reader(os.pidfd_open(owner), reader.feed_eof)
    begin = await wire.read(reader)
    if not isinstance(begin, wire.Begin):
        return
    keeper = None
    try:
        settings, groups, in_force = prepare(begin.limits)
        keeper = Keeper(settings, groups, begin.size, writer)
        await keeper.first()
        writer.write(wire.frame(wire.Ready(in_force)))
        await keeper.serve(reader)
    except UserError as error:
        writer.write(wire.frame(wire.Refused(str(error))))
    except StartError as error:
        writer.write(wire.frame(wire.Refused(refusal.explain(str(error)))))
    finally:
        if keeper is not None:
            await keeper.close()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def main() -> None:
    """The entry point of a keeper."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--owner", type=int, required=True)
    options = parser.parse_args()
    kernel.adopt_orphans()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.umask(0o022)
    os.set_inheritable(options.channel, False)
    # Ctrl-C and a stop are the owner's to handle: it says when this ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(keep(options.channel, options.owner))


if __name__ == "__main__":
    main()
