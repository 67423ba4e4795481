"""A run's metrics to where its user wants them: a class that the recipe names by import path (`report.writer`).

It works in a thread of its own: a service that is slow holds up no step, and one that fails or never answers ends no run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from megarl.core.errors import UserError
from megarl.core.log import get_logger
from megarl.recipe.writer import KEY, asked_by, writer_class

START_S = 60.0  # within which it has to be made
FINISH_S = 60.0  # that a run waits in the end for all that it has not yet written

log = get_logger(__name__)


class OwnWriter:
    """Hands each step on to the user's writer, in order. One that fails is told of once, and gets no more."""

    def __init__(
        self, path: str, folder: Path, recipe: Mapping[str, Any], resumed_step: int | None, *, recovered: bool = False
    ) -> None:
        """recipe: as plain values. recovered: the run goes on by itself, with nobody there to read an error.

        Raises UserError where the writer cannot be made, or is not made in time.
        """
        found = writer_class(path)
        given = {"folder": folder, "recipe": dict(recipe), "resumed_step": resumed_step}
        self._where = f"{KEY}={path!r}"
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._failed = False
        # A daemon: what never returns keeps no process from ending.
        self._thread = Thread(target=self._work, name=KEY, daemon=True)
        self._thread.start()
        made = self._ask(partial(found, **{name: given[name] for name in asked_by(found) if name in given}))
        try:
            self._own = made.result(START_S)
        except TimeoutError:
            self._refuse(f"was not ready within {START_S:g} s", recovered)
        except (Exception, SystemExit) as error:  # of the user's, which may raise anything
            self._refuse(f"could not start: {type(error).__name__}: {error}", recovered)

    def _refuse(self, problem: str, recovered: bool) -> None:
        self._failed = True
        if not recovered:
            raise UserError(f"{self._where} {problem}. Mend it, or leave {KEY} out.")
        log.warning("%s %s: the run goes on without it", self._where, problem)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step; waits for nothing."""
        if not self._failed:
            self._ask(partial(self._write, step, dict(metrics)))

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        if self._failed:
            return  # at a step before
        try:
            self._own.write(step, metrics)
        except (Exception, SystemExit):
            self._failed = True
            log.warning("%s failed at step %d: the run goes on without it", self._where, step, exc_info=True)

    def close(self, failed: bool = False) -> None:
        """Let it write what it has been given, and close it; waits for both as long as FINISH_S."""
        end = time.monotonic() + FINISH_S
        closed = None if self._failed else self._ask(partial(self._close, failed))
        self._jobs.put(None)
        self._thread.join(max(0.0, end - time.monotonic()) if closed is not None else 0.0)
        if closed is not None and not closed.done():
            log.warning("%s has not written everything within %g s, and is left", self._where, FINISH_S)

    def _close(self, failed: bool) -> None:
        if self._failed:
            return  # at one of the last steps
        try:
            self._own.close(failed)
        except (Exception, SystemExit):
            log.warning("%s failed as it was closed", self._where, exc_info=True)

    def _ask(self, job: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        self._jobs.put((job, done))
        return done

    def _work(self) -> None:
        while (asked := self._jobs.get()) is not None:
            job, done = asked
            try:
                done.set_result(job())
            except BaseException as error:
                done.set_exception(error)
