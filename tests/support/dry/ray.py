"""In the place of Ray: actors live in this process, and work while somebody waits, on one event loop.

A call is a task of that loop. It goes on whenever the driver waits for something, and so do those that nobody waits for: what
listens for news, and what never returns because it stands for the life of a process. These end with the stage.
"""

from __future__ import annotations

import asyncio
import inspect
import selectors
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any

TURN_S = 1e-4  # by the clock of the loop


class _Selector(selectors.EpollSelector):
    """waited_s: how long nothing happened, of all the time that was waited."""

    waited_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(timeout)
        if timeout is not None and timeout > 0 and not events:
            self.waited_s += timeout
        return events


class Loop(asyncio.SelectorEventLoop):
    """Goes the same way each time, however busy the machine is: what threads would do is done at once.

    Its clock counts how often it is looked at.
    """

    def __init__(self) -> None:
        self._idle, self._looks = _Selector(), 0
        super().__init__(self._idle)

    def time(self) -> float:
        self._looks += 1
        return self._looks * TURN_S + self._idle.waited_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


class Ref:
    """What a call gives, once it has ended; of several returns the one at that index."""

    def __init__(self, task: asyncio.Task[Any], index: int | None = None) -> None:
        self.task, self._index = task, index

    def __await__(self) -> Generator[Any, None, Any]:
        result = yield from self.task.__await__()
        return result if self._index is None else result[self._index]

    @property
    def ended(self) -> bool:
        """Whether the call has ended."""
        return self.task.done()


class Ray:
    """Makes actors of these classes instead of those that a process would run."""

    def __init__(self, classes: dict[type, Callable[..., Any]], loop: asyncio.AbstractEventLoop) -> None:
        self._classes, self._loop = classes, loop

    def remote(self, kind: type) -> Any:
        """As `ray.remote`."""
        return _Maker(self._classes[kind], self._loop)

    def wait(self, references: Sequence[Ref], **_: Any) -> tuple[list[Ref], list[Ref]]:
        """As `ray.wait` that does not wait: those that have ended, and the others."""
        ended = [each for each in references if each.ended]
        return ended, [each for each in references if not each.ended]

    def get(self, reference: Ref, timeout: float) -> Any:
        """As `ray.get` of what has ended."""
        assert reference.ended and timeout == 0
        return reference.task.result()

    def results(
        self, references: Sequence[Ref], beside: Collection[Ref] = (), ended: Callable[[Ref], None] | None = None
    ) -> list[Any]:
        """What these calls give. Raises what one of them raised.

        ended: is told of each call that ends meanwhile, of those beside; they may change with it.
        """

        async def all_of_them() -> list[Any]:
            return [await each for each in references]

        waiting = self._loop.create_task(all_of_them())
        while not waiting.done():
            others = list(beside)
            either = [waiting, *(each.task for each in others)]
            self._loop.run_until_complete(asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED))
            for each in others:
                if each.ended and each in beside and ended is not None:
                    ended(each)
        return waiting.result()

    def close(self) -> None:
        """End what still goes on."""
        going_on = asyncio.all_tasks(self._loop)

        async def end() -> None:
            for task in going_on:
                task.cancel()
            await asyncio.gather(*going_on, return_exceptions=True)

        self._loop.run_until_complete(end())
        self._loop.close()


class _Maker:
    def __init__(self, make: Callable[..., Any], loop: asyncio.AbstractEventLoop) -> None:
        self._make, self._loop = make, loop

    def options(self, **_: Any) -> _Maker:
        return self

    def remote(self, *arguments: Any) -> _Handle:
        return _Handle(self._loop.create_task(self._made(arguments)), self._loop)

    async def _made(self, arguments: Sequence[Any]) -> Any:
        return self._make(*[await _value(each) for each in arguments])


class _Handle:
    """An actor that is being made: its calls wait for that."""

    def __init__(self, making: asyncio.Task[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._making, self._loop = making, loop

    def __getattr__(self, name: str) -> _Method:
        return _Method(self._making, name, self._loop)


class _Method:
    def __init__(
        self, making: asyncio.Task[Any], name: str, loop: asyncio.AbstractEventLoop, num_returns: int = 1
    ) -> None:
        self._making, self._name, self._loop, self._num_returns = making, name, loop, num_returns

    def options(self, num_returns: int) -> _Method:
        return _Method(self._making, self._name, self._loop, num_returns)

    def remote(self, *arguments: Any) -> Any:
        task = self._loop.create_task(self._called(arguments))
        return Ref(task) if self._num_returns == 1 else [Ref(task, index) for index in range(self._num_returns)]

    async def _called(self, arguments: Sequence[Any]) -> Any:
        values = [await _value(each) for each in arguments]
        result = getattr(await self._making, self._name)(*values)
        return await result if inspect.iscoroutine(result) else result


async def _value(argument: Any) -> Any:
    return await argument if isinstance(argument, Ref) else argument
