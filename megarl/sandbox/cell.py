"""One sandbox, seen from the process that keeps it: started, ready, given one job, ended, gone. It is used once.

Its first process (pid 1 of its namespace) is held by a pidfd: killing it ends everything inside, and once it is gone nothing
of the sandbox is left. What comes out of a sandbox is bytes, and is never believed.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import marshal
import os
import resource
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megarl.core.errors import MegarlError
from megarl.core.janitor import RUN_ID_VARIABLE
from megarl.core.log import get_logger
from megarl.sandbox import bubblewrap, kernel, watch
from megarl.sandbox.cgroups import Group
from megarl.sandbox.job import MIB, SCRIPT, STDIN, Check, Checked, Ending, Job, Limits, Result
from megarl.sandbox.stream import Stream

log = get_logger(__name__)

READY_S = 30.0  # from its start until it waits for a job; on a machine under load it takes seconds
GONE_S = 10.0  # from its killing until the kernel has ended all of it
REMOVE_S = 0.005  # between tries to remove its control group
MOST_SAID = 2**20  # bytes of what one check says
# Answers what a sandbox with tests asks of the one with the code.
Answer = Callable[[bytes], Awaitable[bytes]]
# Runs a check apart from the code, in so many seconds at most.
Judge = Callable[[Check, Answer, float], "Awaitable[Judged]"]


class StartError(MegarlError):
    """A sandbox did not come up: what bubblewrap or the kernel said."""


@dataclass(frozen=True)
class Settings:
    """How sandboxes are made on this machine. user: what root becomes before; None: who it is.

    by_group: memory is held by control groups, and need not be watched.
    """

    bwrap: str
    python: bubblewrap.Interpreter
    runner: str
    filter: bytes
    limits: Limits
    user: int | None
    by_group: bool


@dataclass(frozen=True)
class Judged:
    """What a check apart from the code came to; None where it has to run beside it. seconds: that it took, once it began."""

    checked: Checked | None
    seconds: float


class Cell:
    """One sandbox. `start` makes it; `run` may be called once; `close` in any case."""

    def __init__(self, settings: Settings, group: Group | None, exits: Callable[[int], asyncio.Future[int]]) -> None:
        """Begins to start it. group: its control group, if there are any. exits: of a child, the future of its status.

        Raises OSError.
        """
        self.settings = settings
        self.group = group
        self._ended: tuple[Ending, str] | None = None
        self._finished = False  # all checks were answered
        self._checked: list[Checked] = []
        self._first = -1  # pid of the namespace's first process, and an open handle of it
        self._handle = -1
        self._folder = -1
        self.stdout, self.stderr = (Stream(settings.limits.output_bytes, self._too_much) for _ in range(2))
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        with theirs:
            self._pid = _spawn(settings, group, theirs.fileno(), self.stdout.write_end, self.stderr.write_end)
        os.close(self.stdout.write_end)
        os.close(self.stderr.write_end)
        self.exited = exits(self._pid)

    async def ready(self) -> None:
        """Wait until it waits for a job. Raises StartError."""
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()
        loop.add_reader(self._channel, _settle, arrived)
        try:
            async with asyncio.timeout(READY_S):
                await asyncio.wait([arrived, self.exited], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise StartError(f"a sandbox was not ready after {READY_S:g} s") from None
        finally:
            loop.remove_reader(self._channel)
        words, folders = b"", array.array("i", [-1])
        with contextlib.suppress(OSError):  # where it has ended, its last words say why
            # Not to be inherited by the next sandbox.
            words, ancillary, _, _ = self._channel.recvmsg(
                16, socket.CMSG_SPACE(folders.itemsize), socket.MSG_CMSG_CLOEXEC
            )
            for _, _, data in ancillary:
                folders = array.array("i", data[: folders.itemsize])
        self._folder = folders[0]
        first = watch.children(self._pid)
        if words != b"ready" or not first or self.exited.done():
            await asyncio.wait([self.stderr.ended], timeout=1.0)
            raise StartError(self.stderr.text().strip() or self.stdout.text().strip())
        self._first = first[0]
        try:
            self._handle = os.pidfd_open(self._first)
        except ProcessLookupError:
            raise StartError("a sandbox ended as soon as it was ready") from None

    async def run(self, job: Job, judge: Judge | None = None, answer: Answer | None = None) -> Result:
        """Run a program until it ends, by itself or at a bound; then nothing of the sandbox is left.

        judge: runs those of its checks that are apart. answer: to what the program itself asks of another sandbox.
        Raises StartError where no sandbox comes up for a check.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._left_s, self._over = job.timeout_s, f"it ran for longer than {job.timeout_s:g} s"
        self._begin_time()
        talk = loop.create_task(self._talk(job, judge, answer))
        try:
            status = await asyncio.shield(self.exited)
            seconds = loop.time() - began
            if talk.done() and (error := talk.exception()) is not None:
                raise error
        finally:
            self._stop_time()
            talk.cancel()
        if self.group is not None and self.group.memory_kills():
            self.end("memory", self._memory_words())
        await self.close()
        return self._result(status, seconds)

    def look(self) -> None:
        """End it where all of its processes together have used too much."""
        limits = self.settings.limits
        used = watch.usage(self._first, memory=not self.settings.by_group)
        if used.cpu_s > limits.cpu_s:
            self.end("cpu", f"it took more than {limits.cpu_s:g} CPU seconds")
        elif self.group is not None:
            if self.group.memory_kills():
                self.end("memory", self._memory_words())
        elif used.memory_bytes + watch.folder_bytes(self._folder) > limits.memory_bytes:
            self.end("memory", self._memory_words())

    def end(self, ending: Ending, reason: str) -> None:
        """End it at a bound; the first counts, also where it has ended by itself meanwhile."""
        if self._ended is None and not self._finished:
            self._ended = ending, reason
            self._kill()

    async def close(self) -> None:
        """Kill what is left of it, and wait until the kernel has ended it all."""
        self._kill()
        self._channel.close()
        waits = [self.exited, self.stdout.ended, self.stderr.ended]
        gone = asyncio.get_running_loop().create_future()
        if self._handle >= 0:
            asyncio.get_running_loop().add_reader(self._handle, _settle, gone)
            waits.append(gone)
        _, left = await asyncio.wait(waits, timeout=GONE_S)
        if left:
            log.warning("a sandbox (pid %d) was not gone %g s after it was killed", self._pid, GONE_S)
        await self._let_go()

    async def _let_go(self) -> None:
        """Close what belongs to it, and remove its control group."""
        self.stdout.close()
        self.stderr.close()
        if self._handle >= 0:
            asyncio.get_running_loop().remove_reader(self._handle)
        for fd in (self._handle, self._folder):
            if fd >= 0:
                os.close(fd)
        self._handle = self._folder = -1
        deadline = time.monotonic() + GONE_S
        while self.group is not None and not self.group.removed():
            if time.monotonic() > deadline:
                log.warning("%s could not be removed: something is still in it", self.group.folders)
                break
            await asyncio.sleep(REMOVE_S)

    def _kill(self) -> None:
        if self._handle >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        if self.exited.done():
            return
        # Bubblewrap's first process was not waited for, so that the number is its own; while it starts, its child does not
        # yet end with it.
        for pid in [self._pid] if self._handle >= 0 else list(watch.tree(self._pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _too_much(self) -> None:
        self.end("output", f"it wrote more than {self.settings.limits.output_bytes} bytes")

    def _memory_words(self) -> str:
        return f"its processes and files took more than {self.settings.limits.memory_bytes // MIB} MiB"

    def _result(self, status: int, seconds: float) -> Result:
        ending, reason = self._ended or ("ok" if self._finished or status == 0 else "error", "")
        code = status if ending == "error" or (ending == "ok" and not self._finished) else None
        name = None
        if code is not None and code > 128 and code - 128 in set(signal.Signals):
            name, code = signal.Signals(code - 128).name, None
        return Result(
            ended=ending,
            stdout=self.stdout.text(),
            stderr=self.stderr.text(),
            exit_code=0 if self._finished else code,
            signal=name,
            seconds=seconds,
            reason=reason,
            stdout_cut=self.stdout.cut,
            stderr_cut=self.stderr.cut,
            checked=tuple(self._checked),
        )

    def _begin_time(self) -> None:
        loop = asyncio.get_running_loop()
        self._since, self._timer = loop.time(), loop.call_later(self._left_s, self.end, "timeout", self._over)

    def _stop_time(self) -> None:
        self._timer.cancel()
        self._left_s -= asyncio.get_running_loop().time() - self._since

    async def _talk(self, job: Job, judge: Judge | None, answer: Answer | None) -> None:
        """Send the job; once the program has run, send its checks, and read what they say."""
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._channel, _frame(_words_of(job, self.settings.limits)))
            while answer is not None:
                await self._answer(answer)
            if not job.checks:
                return
            await self._said()
            for check in job.checks:
                self._checked.append(await self._check(check, judge))
            if self._ended is None:
                self._finished = True
                self._kill()
        except (OSError, EOFError):
            return  # it ended, which is told elsewhere
        except StartError:
            self._kill()
            raise

    async def _answer(self, answer: Answer) -> None:
        """Answer one question."""
        question = await self._said(self.settings.limits.input_bytes)
        try:
            said = await answer(question)
        except (OSError, EOFError):  # the one that it asks has ended
            self._kill()
            raise
        await asyncio.get_running_loop().sock_sendall(self._channel, _frame(said))

    async def _check(self, check: Check, judge: Judge | None) -> Checked:
        if check.kind == "apart":
            assert judge is not None, "nobody runs checks apart"
            self._stop_time()  # until the other sandbox has started, it has nothing to do
            try:
                judged = await judge(check, self._call, max(self._left_s, 0.001))
                self._left_s -= judged.seconds
            finally:
                if not self.exited.done():
                    self._begin_time()
            if judged.checked is not None:
                return judged.checked
        return _checked(await self._asked("value" if check.kind == "value" else "assert", check.source))

    async def _call(self, question: bytes) -> bytes:
        return await self._asked("call", question.decode(errors="replace"))

    async def _asked(self, kind: str, source: str) -> bytes:
        await asyncio.get_running_loop().sock_sendall(self._channel, _frame((kind, source)))
        return await self._said()

    async def _said(self, most: int = MOST_SAID) -> bytes:
        size = int.from_bytes(await self._exactly(8), "little")
        if size > most:
            raise EOFError  # that was not the runner
        return await self._exactly(size)

    async def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = await asyncio.get_running_loop().sock_recv(self._channel, size - len(data))
            if not part:
                raise EOFError
            data += part
        return data


def _words_of(job: Job, limits: Limits) -> dict[str, object]:
    """A job as the runner reads it."""
    return {
        "script": SCRIPT,
        "input": STDIN,
        "code": job.code,
        "stdin": job.stdin,
        "files": list(job.files.items()),
        "checked": bool(job.checks),
        "asks": list(job.asks),
        "stand_ins": _stand_ins() if job.asks else "",
        "limits": bubblewrap.process_limits(limits),
    }


@cache
def _stand_ins() -> str:
    return Path(__file__).with_name("stand_ins.py").read_text()


def _checked(said: bytes) -> Checked:
    return Checked(said[:1] == b"+", said[1:].decode(errors="replace"))


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _frame(value: Any) -> bytes:
    data = marshal.dumps(value)
    return len(data).to_bytes(8, "little") + data


def _spawn(settings: Settings, group: Group | None, channel: int, stdout: int, stderr: int) -> int:
    """Start bubblewrap; returns its pid. Raises OSError."""
    filter_read, filter_write = os.pipe()
    os.write(filter_write, settings.filter)  # some kilobytes: the pipe takes them
    os.close(filter_write)
    doors = group.doors() if group is not None else []
    words = bubblewrap.command(
        settings.bwrap, settings.python, settings.limits, seccomp=filter_read, channel=channel, runner=settings.runner
    )
    parent = os.getpid()
    try:
        child = os.fork()
        if child == 0:
            _become(words, settings.user, doors, parent, (filter_read, channel), (stdout, stderr))
    finally:
        for fd in (filter_read, *doors):
            os.close(fd)
    return child


def _become(
    words: list[str], user: int | None, doors: list[int], parent: int, kept: tuple[int, ...], outputs: tuple[int, int]
) -> None:
    """What the child does; it never returns. Into its group first, while it may; then without any rights."""
    try:
        for fd, place in zip((os.open(os.devnull, os.O_RDONLY), *outputs), range(3), strict=True):
            os.dup2(fd, place)
        for door in doors:
            os.write(door, b"0")
        # The first to go where the machine itself is out of memory.
        Path("/proc/self/oom_score_adj").write_text("1000")
        if user is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        kernel.die_with_parent()
        if os.getppid() != parent:
            os._exit(1)  # it ended before the request was made
        for fd in kept:
            os.set_inheritable(fd, True)
        for low, high in itertools.pairwise((2, *sorted(kept), resource.getrlimit(resource.RLIMIT_NOFILE)[0])):
            os.closerange(low + 1, high)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)  # Python ignores them
        os.chdir("/")
        # The run's mark is for those who look for what it left; the program gets none of this.
        os.execve(words[0], words, {name: os.environ[name] for name in (RUN_ID_VARIABLE,) if name in os.environ})
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode(errors="replace"))
    finally:
        os._exit(127)
