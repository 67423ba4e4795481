"""An asyncio event loop whose clock jumps to the next timer: hours of waiting pass in milliseconds, in the same order.

Coroutines, sleeps and deadlines run as they do otherwise. Nothing else may be waited for: no socket, no thread.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(AssertionError):
    """Everybody waits, and no timer is left that could wake anybody."""


class _Jumping(selectors.BaseSelector):
    """Waits by moving the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._real = selectors.DefaultSelector()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError(f"At {self.now:g} s everybody waits, and nothing is due.")
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time` is virtual, in seconds from 0."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run with a virtual clock. Raises DeadlockError where main waits for what never comes."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        try:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        finally:
            loop.close()
