"""The process that environments run in: each in a thread with an event loop of its own, so that blocking costs nobody else.

Started by environment_processes.py, which holds the deadlines. Frames on its socket, in both directions, are a length and a
pickle: Call, Cancel; Answer. It ends when the socket closes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import os
import pickle
import socket
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, BinaryIO

from megarl.agents.environment import Environment
from megarl.agents.environment_wire import MOST_BYTES, Answer, Call, Cancel
from megarl.agents.loading import Make, open_environment
from megarl.agents.observations import sendable_answer
from megarl.agents.patience import ENDS_ALL, MOST_TRACE, in_words
from megarl.agents.tools import as_given
from megarl.recipe.agent import Agent
from megarl.rewards.worker import HEADER, frame

MOST_WORDS = 2**15  # characters of an error
CLOSE_S = 10.0  # for an environment to close after nobody waits for that any more


class _Home:
    """One environment's thread and event loop. Raises OSError or RuntimeError where the process may have no more of them."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._environment: Environment | None = None
        self._loop = asyncio.new_event_loop()
        try:
            threading.Thread(target=self._run, name="environment", daemon=True).start()
        except RuntimeError:
            self._loop.close()
            raise

    def call(self, asked: Call) -> Future[Any]:
        """Call it, after what was called before has given its thread back."""
        return asyncio.run_coroutine_threadsafe(self._call(asked), self._loop)

    def cancel(self, running: Future[Any], method: str) -> None:
        """Cancel a call. To close begins yet where what blocks before it gives the thread back: it has time from then on."""
        if method != "close":
            running.cancel()
            return
        with contextlib.suppress(RuntimeError):  # it has ended just now, and its loop is closed
            self._loop.call_soon_threadsafe(self._loop.call_later, CLOSE_S, running.cancel)

    def end(self) -> None:
        """Let go of the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()  # it has open files

    async def _call(self, asked: Call) -> Any:
        method, arguments = asked.method, asked.arguments
        try:
            if method == "start":
                self._environment = self._make()
                messages = await self._environment.start(*arguments)
                return sendable_answer(messages), bool(getattr(self._environment, "timed", False))
            if self._environment is None:
                return None
            given = getattr(self._environment, method)(*arguments, **(asked.values or {}))
            given = await given if inspect.isawaitable(given) else given
            return sendable_answer(given) if asked.values is None else as_given(given)
        except ENDS_ALL as error:  # would end the thread
            raise RuntimeError(f"it exits ({error})") from error


class _Worker:
    def __init__(self, make: Make, say: Callable[[Answer], None]) -> None:
        self._make, self._say = make, say
        self._homes: dict[int, _Home] = {}
        self._running: dict[int, tuple[Call, Future[Any]]] = {}

    def take(self, asked: Call | Cancel) -> None:
        """Begin what is asked; answers come when they come."""
        if isinstance(asked, Cancel):
            if (found := self._running.get(asked.number)) is not None:
                call, running = found
                if (home := self._homes.get(call.environment)) is not None:
                    home.cancel(running, call.method)
            return
        if asked.method == "start":
            try:
                self._homes[asked.environment] = _Home(self._make)
            except (OSError, RuntimeError) as error:  # of one too many: the others of this process go on
                self._say(Answer(asked.number, error=f"{in_words(error)}: its process has {len(self._homes)} of them"))
                return
        home = self._homes.get(asked.environment)
        if home is None:  # one that did not start is closed
            self._say(Answer(asked.number, pickle.dumps(None)))
            return
        running = home.call(asked)
        self._running[asked.number] = asked, running
        running.add_done_callback(lambda ended: self._ended(asked, home, ended))

    def _ended(self, asked: Call, home: _Home, ended: Future[Any]) -> None:
        self._running.pop(asked.number, None)
        if asked.method == "close":
            self._homes.pop(asked.environment, None)
            home.end()
        if not ended.cancelled():
            self._say(_answer(asked.number, ended))


def _answer(number: int, ended: Future[Any]) -> Answer:
    error = ended.exception()
    if error is None:
        try:
            value = pickle.dumps(ended.result())
            if len(value) <= MOST_BYTES:
                return Answer(number, value)
            return Answer(
                number,
                error=f"ValueError: what it gave has {len(value)} bytes, and {MOST_BYTES} at most leave its process",
            )
        except Exception as unfit:  # whatever pickling a user's object raises
            return Answer(number, error=f"{type(unfit).__name__}: what it gave cannot leave its process: {unfit}")
    trace = "".join(traceback.format_exception(error))[-MOST_TRACE:]
    return Answer(number, error=in_words(error)[:MOST_WORDS], trace=trace)


def serve(make: Make, channel: socket.socket) -> None:
    """Do what is asked until the socket closes."""
    lock = threading.Lock()

    def say(answer: Answer) -> None:
        with lock:
            channel.sendall(frame(answer))

    worker = _Worker(make, say)
    with channel.makefile("rb") as asked:
        while (call := _read(asked)) is not None:
            worker.take(call)


def _read(pipe: BinaryIO) -> Any:
    header = pipe.read(HEADER.size)
    return pickle.loads(pipe.read(HEADER.unpack(header)[0])) if len(header) == HEADER.size else None


def main() -> None:
    """Parse, serve, end: whatever threads are stuck in."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--agent", required=True, help="the recipe's section, as JSON")
    options = parser.parse_args()
    make = open_environment(Agent.model_validate_json(options.agent))
    with socket.socket(fileno=options.channel) as channel:
        channel.sendall(frame(Answer(-1)))
        serve(make, channel)
    os._exit(0)


if __name__ == "__main__":
    main()
