"""torch's profiler on some steps of a run: begins on the ranks before a step, and writes what it saw after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.cluster.ranks import RankGroup
from megarl.cluster.waits import Worker
from megarl.core.log import get_logger
from megarl.recipe.run import Profiler

FOLDER = "profile"  # in the run's

log = get_logger(__name__)


@dataclass(frozen=True)
class StepProfiler:
    """A step's context, as PhaseTimer takes it. folder: the run's. deadline_s: to write what a step had."""

    pools: Sequence[RankGroup]
    settings: Profiler
    folder: Path
    deadline_s: float

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """Around a step: profiled, where it is one that is to be. One that fails leaves no profile."""
        if step not in self.settings.steps:
            yield
            return
        self._ask(lambda worker: worker.handle.begin_profile.remote(self.settings.memory))
        yield
        folder = self.folder / FOLDER
        problems = self._ask(lambda worker: worker.handle.end_profile.remote(self._file(folder, step, worker)))
        if problems := [problem for problem in problems if problem]:
            log.warning("the profile of step %d could not be written into %s: %s", step, folder, problems[0])
        else:
            log.info("the profile of step %d is in %s", step, folder)

    @staticmethod
    def _file(folder: Path, step: int, worker: Worker) -> Path:
        return folder / f"step_{step:06d}_{worker.name.replace(' ', '_')}.json.gz"

    def _ask(self, remote: Callable[[Worker], Any]) -> list[Any]:
        """Of each rank that is watched, in each pool that has it."""
        asked = [
            ranks.ask(lambda worker, _: remote(worker), "profile", "ranks", self.deadline_s, only=only)
            for ranks in self.pools
            if (only := [rank for rank in self.settings.ranks if rank < len(ranks.workers)])
        ]
        return [answer for each in asked for answer in each.wait()]
