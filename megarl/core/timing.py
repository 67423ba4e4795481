"""Where the driver's seconds go: by phase, by step, and how much of a step is the driver's own work.

For one thread: the driver's. Timing inside of ranks and servers is theirs to report.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from megarl.core.metrics import PHASES
from megarl.core.progress import Done

PHASE_FILE = "driver.phase"  # among a run's logs: the step and the phase that the driver is in
MOST_SPANS = 10_000  # that a timer keeps, of a run that may have any number of steps
# Phases in which the ranks compute, whatever the run.
OF_RANKS = ("logprobs", "reference", "teacher", "values", "reward_model", "critic", "update")


@dataclass(frozen=True)
class Span:
    """Something that took time. Seconds since the timer was made; `PhaseTimer.epoch` places them on the wall clock."""

    name: str
    role: str
    start: float
    end: float


def write_phase(path: Path, step: int | None, phase: str | None) -> None:
    """Let others see what the driver does: `12 update`, `- start` outside of steps, nothing between phases."""
    path.write_text(f"{'-' if step is None else step} {phase}\n" if phase is not None else "")


def read_phase(path: Path) -> tuple[int | None, str] | None:
    """What `write_phase` wrote: the step and the phase; None where there is none."""
    words = path.read_text().split() if path.exists() else []
    return (None if words[0] == "-" else int(words[0]), words[1]) if len(words) == 2 else None


class PhaseTimer:
    """Collects seconds by phase, and the last spans for a trace.

        with timer.step(3):
            with timer.phase("rollout"):
                with timer.waiting():
                    ...
        timer.metrics(num_tokens)

    A phase within another interrupts it: seconds count once, and add up to at most the step's. A phase outside of a step
    counts in `totals` alone.
    on_phase: called with (step, phase) as a phase begins or goes on, with (step, None) as it ends; step is None outside of
    steps.
    on_progress: called with how far the operation is that the driver waits for, as often as it looks.
    around: a context of each step, which is entered before its time begins, and left after it has ended.
    clock: seconds that only go up. ranks_evaluate: whether held-out rows are the ranks' work, and not the servers'.
    """

    def __init__(
        self,
        on_phase: Callable[[int | None, str | None], None] | None = None,
        on_progress: Callable[[Done], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        ranks_evaluate: bool = False,
    ) -> None:
        self._of_ranks = (*OF_RANKS, "eval") if ranks_evaluate else OF_RANKS
        self.epoch = time.time()
        self.spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self.totals: dict[str, float] = {}  # seconds by phase since the start
        self.last: tuple[int | None, str] | None = None  # the step and the phase that began, or went on, last
        self._on_phase = on_phase
        self.on_progress = on_progress
        self.around: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext()
        self._clock = clock
        self._origin = clock()
        self._step: int | None = None
        self._phase: str | None = None
        self._within_s = 0.0  # seconds of phases that interrupted this one
        self._waits = 0  # how many waiting() are open
        self._waited_s = 0.0
        self._step_s = 0.0
        self._own_s = 0.0  # the driver's own, of the last step
        self._phases: dict[str, float] = {}

    def elapsed_s(self) -> float:
        """Seconds since the timer was made."""
        return self._clock() - self._origin

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """One step; forgets the one before."""
        assert self._step is None, f"step {number} began inside of step {self._step}"
        with self.around(number):
            self._step, self._phases, self._waited_s, self._step_s = number, {}, 0.0, 0.0
            start = self.elapsed_s()
            try:
                yield
            finally:
                self._step = None
                self._step_s = self.add_span("step", "driver", start).end - start
                self._own_s = max(0.0, self._step_s - self._waited_s)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One phase, by a name in PHASES; the same name may come again within a step, and adds up."""
        assert name in PHASES, f"phase {name!r} is not one of {', '.join(PHASES)}"
        outer, within_s = self._phase, self._within_s
        self._phase, self._within_s, self.last = name, 0.0, (self._step, name)
        if self._on_phase is not None:
            self._on_phase(self._step, name)
        start = self.elapsed_s()
        try:
            yield
        finally:
            spent_s = self.add_span(name, "driver", start).end - start
            seconds = spent_s - self._within_s
            self._phase, self._within_s = outer, within_s + spent_s
            self.totals[name] = self.totals.get(name, 0.0) + seconds
            if self._step is not None:
                self._phases[name] = self._phases.get(name, 0.0) + seconds
            if self._on_phase is not None:
                self._on_phase(self._step, outer)
        if outer is not None:  # after an error, `last` stays where that was
            self.last = (self._step, outer)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time in here is not the driver's own; a wait inside of a wait counts once."""
        start = self.elapsed_s()
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1
            if self._waits == 0:
                self._waited_s += self.elapsed_s() - start

    def add_span(self, name: str, role: str, start: float, end: float | None = None) -> Span:
        """Record what somebody did between two moments (elapsed_s); the end is now where none is given."""
        span = Span(name, role, start, self.elapsed_s() if end is None else end)
        self.spans.append(span)
        return span

    def metrics(self, num_tokens: int, epochs: int = 1) -> dict[str, float]:
        """perf/* of the last finished step.

        num_tokens: prompt and response tokens that it trained on. epochs: times that the update went through them.
        """
        assert self._step is None, "metrics are of a finished step"
        step_s, update_s = self._step_s, self._phases.get("update", 0.0)
        metrics = {"perf/step_s": step_s, "perf/driver_s": self._own_s}
        metrics |= {f"perf/{name}_s": seconds for name, seconds in self._phases.items()}
        if step_s > 0:
            metrics["perf/driver_fraction"] = self._own_s / step_s
            metrics["perf/tokens_per_s"] = num_tokens / step_s
            busy_s = sum(self._phases.get(name, 0.0) for name in self._of_ranks)
            metrics["perf/ranks_idle"] = max(0.0, 1 - busy_s / step_s)
        if update_s > 0:
            metrics["perf/train_tokens_per_s"] = epochs * num_tokens / update_s
        return metrics
