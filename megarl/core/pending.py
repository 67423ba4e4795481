"""Operations that have begun and are waited for later: what can be made of them without knowing what they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from megarl.core.protocols import Pending
from megarl.core.timing import PhaseTimer

T = TypeVar("T")


@dataclass(frozen=True)
class Finished(Generic[T]):
    """An operation that has ended already."""

    result: T

    def wait(self) -> T:
        """The result."""
        return self.result

    def poll(self) -> T | None:
        """The result."""
        return self.result


@dataclass
class Once(Generic[T]):
    """An operation that several wait for: the first does, and wherever that is, its seconds count in this phase."""

    pending: Pending[T]
    timer: PhaseTimer
    phase: str
    _result: T | None = None

    def wait(self) -> T:
        """What the operation gives."""
        if self._result is None:
            with self.timer.phase(self.phase):
                self._result = self.pending.wait()
        return self._result

    def poll(self) -> T | None:
        """What the operation gives, where it has ended."""
        if self._result is None:
            self._result = self.pending.poll()
        return self._result


@dataclass(frozen=True)
class Joined(Generic[T]):
    """Several operations, waited for in their order. finish: makes of their results what they give together."""

    parts: Sequence[Pending[Any]]
    finish: Callable[[list[Any]], T]

    def wait(self) -> T:
        """What they give. Raises what the first of them raises that fails, in their order."""
        return self.finish([part.wait() for part in self.parts])

    def poll(self) -> T | None:
        """What they give, where all have ended."""
        results = [part.poll() for part in self.parts]
        return None if any(result is None for result in results) else self.finish(results)
