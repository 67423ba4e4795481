"""Calls of what somebody else wrote, within a deadline: whatever goes wrong in them costs one episode, and no process."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from typing import TypeVar

from megarl.agents.environment import EnvironmentFailedError

T = TypeVar("T")

GRACE_S = 1.0  # for a call that was cancelled to tidy up; one that does not end is left behind
NEVER_S = 1e9  # for what counts its seconds by itself
MOST_TRACE = 4000  # characters, the last ones
ENDS_ALL = (SystemExit, KeyboardInterrupt)  # would end this process, whoever raises them


async def within(call: Callable[[], Awaitable[T]], seconds: float, what: str) -> T:
    """What the call gives. Raises EnvironmentFailedError where it raises, or has not ended by then."""

    async def guarded() -> T:
        try:
            return await call()
        except ENDS_ALL as error:
            raise RuntimeError(f"it exits ({error})") from error

    task = asyncio.ensure_future(guarded())
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await _end(task)
        raise
    if not task.done():
        await _end(task)
        raise EnvironmentFailedError(f"{what} did not end within {seconds:g} s")
    if task.cancelled():
        raise EnvironmentFailedError(f"{what} was cancelled by itself")
    error = task.exception()
    if isinstance(error, EnvironmentFailedError):
        raise error
    if error is not None:
        trace = "".join(traceback.format_exception(error))[-MOST_TRACE:]
        raise EnvironmentFailedError(f"{what} raised {in_words(error)}", trace) from error
    return task.result()


def in_words(error: BaseException) -> str:
    """Its type and what it says, where it can say something."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # of the words themselves
        return f"{type(error).__name__}, which has no words"


async def _end(task: asyncio.Future[T]) -> None:
    task.cancel()
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody else looks at it any more
    await asyncio.wait({task}, timeout=GRACE_S)
