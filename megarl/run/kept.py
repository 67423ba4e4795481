"""What one life of a run leaves to the next, within one driver: Ray, and the servers. Who they are: cluster/kept.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.cluster.kept import KeptPool
    from megarl.cluster.runtime import Runtime


@dataclass
class Kept:
    """Use as a context manager around all lives of a run: what is left in the end is ended.

    pool: servers that another life takes over; so it does with the Ray that they are of.
    """

    pool: KeptPool | None = None
    _runtime: Runtime | None = None

    @contextmanager
    def life(self, start: Callable[[], Runtime]) -> Iterator[Runtime]:
        """What the last life has left, or what `start` makes; ended with this life, unless a pool is kept meanwhile."""
        runtime = self._runtime = self._runtime or start()
        try:
            yield runtime
        except BaseException as error:
            runtime.judge(error)
            if self.pool is None:
                self._end()
            raise
        self._end()

    def take(self) -> KeptPool | None:
        """The servers of the last life, for this one; None where there are none."""
        pool, self.pool = self.pool, None
        return pool

    def _end(self) -> None:
        runtime, self._runtime, self.pool = self._runtime, None, None
        if runtime is not None:
            runtime.close()

    def __enter__(self) -> Kept:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
