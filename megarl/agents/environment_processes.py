"""Environments in worker processes, as an episode sees them: what blocks there holds up nobody else.

Not for deadlines (patience.py), nor for what runs there (environment_worker.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

from megarl.agents.environment import EnvironmentBrokenError, EnvironmentFailedError, EpisodeRow, Response
from megarl.agents.environment_wire import MOST_BYTES, Answer, Call, Cancel
from megarl.core.end_signals import ending_of
from megarl.core.log import get_logger
from megarl.recipe.agent import Agent
from megarl.rewards.worker import HEADER, frame
from megarl.serving.process import GUARD

log = get_logger(__name__)

START_S = 60.0
MOST_FRAME = MOST_BYTES + 2**16  # of an answer with what is around its value
CLOSE_S = 5.0


class EnvironmentProcesses:
    """`agent.workers` processes, started when the first episodes come; one that dies costs its episodes, and is started anew."""

    def __init__(self, agent: Agent) -> None:
        assert agent.workers is not None
        # The environment alone: what else a section says asks for keys of its own.
        told = Agent(environment=agent.environment, settings=agent.settings)
        self._arguments = ("--agent", told.model_dump_json(include={"environment", "settings"}))
        self._workers: list[_Process | None] = [None] * agent.workers
        self._starting = [asyncio.Lock() for _ in self._workers]
        self._turns = itertools.cycle(range(agent.workers))

    def make(self) -> RemoteEnvironment:
        """An environment, in the next process by turns."""
        return RemoteEnvironment(self, next(self._turns))

    async def process(self, index: int) -> _Process:
        """One that is there. Raises EnvironmentFailedError where it does not start."""
        async with self._starting[index]:
            found = self._workers[index]
            if found is None or found.ended:
                if found is not None:
                    log.warning("an environments' process ended: %s; another is started", found.ended)
                    await found.close()
                found = self._workers[index] = await _Process.start(self._arguments)
            return found

    async def close(self) -> None:
        """End all processes, with all that environments started in their sessions."""
        await asyncio.gather(*(process.close() for process in self._workers if process is not None))


class RemoteEnvironment:
    """An Environment whose methods run in a worker process. timed: as of Environment, known once it has started."""

    def __init__(self, processes: EnvironmentProcesses, index: int) -> None:
        self.timed = False
        self._processes, self._index = processes, index
        self._process: _Process | None = None
        self._number = -1

    async def ready(self) -> None:
        """Have its process, whatever the others do. Raises EnvironmentFailedError where that does not start."""
        await self._processes.process(self._index)

    async def start(self, row: EpisodeRow) -> Any:
        """Make the environment, and start it."""
        self._process = await self._processes.process(self._index)
        self._number = self._process.number()
        messages, self.timed = await self._process.call(self._number, "start", row)
        return messages

    async def step(self, response: Response) -> Any:
        """As of Environment."""
        assert self._process is not None
        return await self._process.call(self._number, "step", response)

    async def reward(self) -> Any:
        """As of an Environment without step."""
        assert self._process is not None
        return await self._process.call(self._number, "reward")

    async def tool(self, name: str, values: Mapping[str, Any]) -> Any:
        """What a method gives that is a tool, as `as_given` has it."""
        assert self._process is not None
        return await self._process.call(self._number, name, values=values)

    async def close(self) -> None:
        """As of Environment; nothing is left to close where its process has ended."""
        if self._process is not None and not self._process.ended:
            await self._process.call(self._number, "close")


class _Process:
    """One worker, and the calls that wait for it. ended: how it ended, where it has."""

    def __init__(self, process: asyncio.subprocess.Process, writer: asyncio.StreamWriter) -> None:
        self.ended = ""
        self._process, self._writer = process, writer
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = itertools.count()
        self._listening: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, arguments: tuple[str, ...]) -> _Process:
        """Returns once it is ready. Raises EnvironmentFailedError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", str(GUARD), str(os.getpid())),
                    *(sys.executable, "-m", "megarl.agents.environment_worker", "--channel", str(theirs.fileno())),
                    *arguments,
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise EnvironmentFailedError(f"an environments' process did not start: {error}") from error
        reader, writer = await asyncio.open_connection(sock=ours)
        found = cls(process, writer)
        try:
            async with asyncio.timeout(START_S):
                ready = await _read(reader)
        except TimeoutError:
            ready = None
        except BaseException:
            await found.close()
            raise
        if ready is None:
            await found.close()
            raise EnvironmentFailedError("an environments' process did not start; the collector's log has what it said")
        found._listening = asyncio.create_task(found._listen(reader))
        return found

    def number(self) -> int:
        """Another one each time: of a call, or of an environment."""
        return next(self._numbers)

    async def call(
        self, environment: int, method: str, *arguments: Any, values: Mapping[str, Any] | None = None
    ) -> Any:
        """What a method gives. values: by name, of a tool. Cancelled, the process is told so.

        Raises EnvironmentBrokenError where the process has ended, EnvironmentFailedError where the method raised.
        """
        if self.ended:
            raise EnvironmentBrokenError(f"its process ended: {self.ended}")
        number = self.number()
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._writer.write(frame(Call(number, environment, method, arguments, values)))
        try:
            answer = await future
        except asyncio.CancelledError:
            self._writer.write(frame(Cancel(number)))
            raise
        finally:
            del self._waiting[number]
        if answer.error:
            raise EnvironmentFailedError(f"{method} raised {answer.error}", answer.trace)
        try:
            return pickle.loads(answer.value)
        except Exception as error:  # whatever a user's object raises
            raise EnvironmentFailedError(f"{method} gave what cannot be read here: {error}") from error

    async def close(self) -> None:
        """End it, and what environments started in its session."""
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        if self._listening is not None:
            await asyncio.wait({self._listening}, timeout=CLOSE_S)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        ended = asyncio.ensure_future(self._process.wait())
        while True:
            reading = asyncio.ensure_future(_read(reader))
            await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():  # what an environment has forked may hold the socket open
                reading.cancel()
                break
            if (answer := reading.result()) is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)  # it says nothing any more that could be read
                break
            waiting = self._waiting.get(answer.number)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        self.ended = ending_of(await ended)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EnvironmentBrokenError(f"its process ended: {self.ended}"))


async def _read(reader: asyncio.StreamReader) -> Answer | None:
    """The next answer; None where there is none any more, or it is larger than any that is sent."""
    try:
        (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        if size > MOST_FRAME:
            log.warning(
                "an environments' process is ended: it would send %d bytes, and %d at most are read", size, MOST_FRAME
            )
            return None
        body = await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    answer: Answer = pickle.loads(body)
    return answer
