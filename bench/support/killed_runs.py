"""A run whose processes are killed one after the other, each while the driver is in a given phase."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.core.timing import PHASE_FILE, read_phase
from tests.end_to_end.chaos import VICTIMS
from tests.end_to_end.harness import Driver, is_coordinator, is_rank, is_raylet, start

KINDS: Mapping[str, Callable[[str], bool]] = {
    "driver": lambda command: False,  # known as itself
    "rank": is_rank,
    **VICTIMS,
    "coordinator": is_coordinator,
    "raylet": is_raylet,
    "grader": lambda command: "megarl.rewards.worker" in command,
}
# By what a reader calls them: the driver's name for it. A grade is within the rollout, while a grader works.
PHASES: Mapping[str, str] = {
    "start": "start",
    "generate": "rollout",
    "grade": "rollout",
    "log-probs": "logprobs",
    "update": "update",
    "sync": "sync",
    "save": "save",
    "evaluate": "eval",
}
LONGEST_S, POLL_S = 900.0, 0.001
PATIENCE = 4  # steps in which a cell may come about
MARK, GRADE_S = "grading", 0.05
STALENESS = 1
# Of the harness's recipe: it generates while it trains, with two of all that may be killed.
ASYNCHRONOUS = (
    f"rollout.max_staleness={STALENESS}",
    "rollout.in_flight=in_place",
    "rollout.keep_kv=true",
    "rollout.servers=2",
    "rollout.collectors=2",
    "rollout.max_response_tokens=32",
    "rollout.max_restarts=1000",
    "algorithm.correction={}",
    "actor.micro_batch_tokens=1024",
)
RECOVERED = re.compile(r"^\S+ \S+ WARNING megarl\.run\.recovery: recovery \d+", re.MULTILINE)
Seen = tuple[int | None, str] | None  # what the driver says that it does: step and phase


def graded(prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
    """A share of digits; it takes a while, and who looks for a grader at work sees that there is one."""
    Path(tempfile.gettempdir(), MARK).touch()
    time.sleep(GRADE_S)
    return sum(character.isdigit() for character in response) / max(len(response), 1)


@dataclass(frozen=True)
class Cell:
    """A process of this kind is killed in this phase."""

    kind: str
    phase: str

    @property
    def name(self) -> str:
        """For people and for --only."""
        return f"{self.kind}/{self.phase}"


@dataclass
class Sought:
    """What was seen of a cell until it came about: how often its phase, and in how many of these a process of its kind."""

    cell: Cell
    phases: set[int] = field(default_factory=set)
    with_process: set[int] = field(default_factory=set)

    @property
    def why(self) -> str:
        """Why it did not come about."""
        if not self.phases:
            return "the phase was not seen"
        if not self.with_process:
            return f"no {self.cell.kind} is there, in {len(self.phases)} such phases"
        return f"over before the kill, {len(self.with_process)} times"


@dataclass
class Struck:
    """A run that loses one process after the other, and is gone on with wherever it ended.

    cells: what was killed so far, with what became of the run: `then` is empty until that is known.
    """

    folder: Path
    name: str
    setting: Sequence[str]
    driver: Driver
    cells: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def begin(cls, folder: Path, name: str, setting: Sequence[str], *words: str) -> Struck:
        """Start it. words: of this start alone, as of one that goes on with a run."""
        # What the last life did is not what this one does.
        (folder / "runs" / name / "logs" / PHASE_FILE).unlink(missing_ok=True)
        return cls(folder, name, setting, start(folder, f"run.name={name}", *setting, *words))

    @property
    def _phase_file(self) -> Path:
        return self.driver.folder / "logs" / PHASE_FILE

    def _recoveries(self) -> int:
        log = self.driver.folder / "logs" / "driver.log"
        return len(RECOVERED.findall(log.read_text())) if log.exists() else 0

    def _go_on(self) -> bool:
        """Where the driver has ended, by what was killed: start it again. Off where it has come to its end.

        Raises RuntimeError where it ended of anything else.
        """
        code, _, error = self.driver.finish(LONGEST_S)
        if code == 0:
            return False
        if not self.cells or self.cells[-1]["then"]:
            raise RuntimeError(f"{self.name} ended with code {code}, and nothing had been killed since:\n{error}")
        self.driver.assert_nothing_left(within_s=60)
        self._known("ended")
        self._phase_file.unlink(missing_ok=True)
        self.driver = start(self.folder, f"run.name={self.name}", *self.setting, "--continue")
        return True

    def _known(self, then: str) -> None:
        self.cells[-1]["then"] = then
        del self.cells[-1]["recoveries"]

    def _settle(self) -> None:
        """The run has gone on since the last kill: say how."""
        if self.cells and not self.cells[-1]["then"]:
            self._known("recovered" if self._recoveries() > self.cells[-1]["recoveries"] else "went on")

    def strike(self, cell: Cell, step: int) -> Sought | None:
        """Kill, in this step or one of the next; where that does not come about, what was seen."""
        end, pids, sought = time.monotonic() + LONGEST_S, list[int](), Sought(cell)
        while time.monotonic() < end:
            if self.driver.process.poll() is not None:
                if not self._go_on():
                    return sought
                pids = []
            seen = read_phase(self._phase_file)
            if seen is not None and not pids and (cell.phase == "start" or (seen[0] or 0) >= step):
                pids = self._pids(cell)
            if self._in_phase(cell, step, seen):
                sought.phases.add(self._phase_file.stat().st_mtime_ns)
                if pids:
                    sought.with_process.add(self._phase_file.stat().st_mtime_ns)
            elif seen is not None and (seen[0] or 0) >= (1 if cell.phase == "start" else step + PATIENCE):
                return sought
            if pids and self._meets(cell, step, seen):
                if self._killed(cell, step, pids):
                    self._wait_for_start(cell, end)
                    return None
                pids = []
            time.sleep(POLL_S)
        raise RuntimeError(f"{cell.name} did not come about in {LONGEST_S:g} s.\n{self.driver.where()}")

    def _pids(self, cell: Cell) -> list[int]:
        if cell.kind == "driver":
            return [self.driver.process.pid]
        try:
            return sorted(self.driver.pids(KINDS[cell.kind]))
        except (FileNotFoundError, IndexError):  # it has not told its id yet
            return []

    def _in_phase(self, cell: Cell, step: int, seen: Seen) -> bool:
        if seen is None or seen[1] != PHASES[cell.phase]:
            return False
        return cell.phase == "start" or (seen[0] or 0) >= step

    def _meets(self, cell: Cell, step: int, seen: Seen) -> bool:
        """Whether it is the moment."""
        if not self._in_phase(cell, step, seen):
            return False
        since = max(self._phase_file.stat().st_mtime, time.time() - GRADE_S)
        marks = self.driver.temp.glob(f"**/{MARK}") if cell.phase == "grade" else ()
        return cell.phase != "grade" or any(mark.stat().st_mtime > since for mark in marks)

    def _killed(self, cell: Cell, step: int, pids: list[int]) -> bool:
        """Kill one while the driver stands still in the phase; off where it has left it meanwhile."""
        self.driver.process.send_signal(signal.SIGSTOP)
        seen = read_phase(self._phase_file)
        try:
            if not self._meets(cell, step, seen):
                return False
            os.kill(pids[0], signal.SIGKILL)
        except ProcessLookupError:
            return False  # another has come in its place
        finally:
            self.driver.process.send_signal(signal.SIGCONT)
        self._settle()
        done = {"kind": cell.kind, "phase": cell.phase, "step": seen[0] if seen else None, "then": ""}
        self.cells.append({**done, "recoveries": self._recoveries()})
        return True

    def _wait_for_start(self, cell: Cell, end: float) -> None:
        """What a start has lost ends it, or not; nothing more is killed before that is seen."""
        while cell.phase == "start" and self.driver.process.poll() is None and time.monotonic() < end:
            seen = read_phase(self._phase_file)
            if seen is not None and seen[0] is not None:
                return
            time.sleep(POLL_S)

    def finish(self) -> None:
        """Until its last step. Raises RuntimeError where it does not come there."""
        while self._go_on():
            pass
        self._settle()
        self.driver.assert_nothing_left(within_s=60)
