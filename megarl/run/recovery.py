"""Goes on with a run that has lost a process which nobody starts again, or a node, without being started again itself.

So does a run that goes back to its last checkpoint because of what a step would have taught it: the journal says then what it
passes over.

The run is taken apart, and resumes in the same driver, as `--continue` would: from its newest checkpoint, and from the samples
in its journal. Servers that are well stay up for it (kept.py). Servers, the router and collectors that die are not lost: they
come back while the run goes on (cluster/healing.py). What cannot be recovered from is raised as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megarl.core.errors import MegarlError, UserError
from megarl.core.exit_codes import FAULT
from megarl.core.log import get_logger
from megarl.core.stop import StopRequest
from megarl.report.history import read_history

log = get_logger(__name__)


class RewoundError(MegarlError):
    """The run goes back to its last checkpoint, as it is written in its journal: it has to be made again from there."""

    recoverable = True


def goes_on(error: BaseException) -> bool:
    """Whether a run may go on in the same driver after it."""
    return isinstance(error, MegarlError) and error.recoverable


@dataclass
class Recoveries:
    """How often a run was recovered, and whether it may be once more.

    most: recoveries without a further step in between. history: the run's metrics.jsonl. total: recoveries so far. steps: of the
    run, once its rows have been counted.
    """

    most: int
    history: Path
    total: int = 0
    steps: int | None = None
    _stop: StopRequest | None = None  # of a run that has started
    _told: str = ""  # what a user should read of the last end
    _reached: int = -1  # the last step that had been written at the last death
    _vain: int = 0  # deaths since then

    @property
    def again(self) -> bool:
        """Whether the run has begun before, in this driver."""
        return self._stop is not None

    def begun(self, stop: StopRequest) -> None:
        """All processes of the run have started. stop: the request to end early."""
        self._stop = stop

    def tell(self) -> None:
        """Say why the run begins again, once its log is open; nothing where it is not."""
        if self._told:
            log.warning("%s", self._told)
        self._told = ""

    def rewound(self, error: RewoundError) -> None:
        """It is no death, and the journal counts how often."""
        self._told = str(error)

    def another(self, error: MegarlError) -> bool:
        """Count a death; whether the run is recovered from it."""
        # What dies while it is first started dies of what it was given. Whoever asked for an end gets it.
        if not goes_on(error) or self._stop is None or self._stop.asked:
            return False
        reached = self._last_step()
        self._vain = 1 if reached > self._reached else self._vain + 1
        self._reached = max(reached, self._reached)
        if self._vain > self.most:
            if self.most:
                error.add_note(f"It was recovered {self.most} times in vain: no step was done in between.")
            return False
        self.total += 1
        self._told = f"recovery {self.total}: the run goes on from its last checkpoint and journal. {error}"
        return True

    def _last_step(self) -> int:
        rows = read_history(self.history) if self.history.exists() else []
        return max((row["step"] for row in rows), default=-1)


def live(recoveries: Recoveries, life: Callable[[bool], None]) -> None:
    """Run `life`, and again where a process died. It is told whether it goes on with what another one left."""
    again = False
    while True:
        try:
            return life(again)
        except UserError as error:
            if again:
                error.exit_code = FAULT  # of a run that had begun
            raise
        except RewoundError as error:
            recoveries.rewound(error)
        except MegarlError as error:
            if not recoveries.another(error):
                raise
        again = True
