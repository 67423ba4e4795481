"""Records metrics and commits checkpoints for the loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import psutil

from megarl.core.protocols import Coming, Metrics, Pending, State, with_epoch
from megarl.core.stop import StopRequest
from megarl.core.types import EvalResult
from megarl.models.flops import mfu
from megarl.report.console import RunConsole
from megarl.report.writers import Writers
from megarl.training.run_checkpoints import Checkpoints, Committed


class Devices(NamedTuple):
    """Of one pool, which may not be all that a run has. peak_tflops: what one of them could do, where that is known."""

    num: int
    peak_tflops: float | None = None


@dataclass
class Line:
    """A step that has ended. coming: what its metrics wait for. peaks: bytes by role and operation until its end."""

    step: int
    metrics: Metrics
    failure: str
    coming: list[Coming]
    peaks: Pending[dict[str, int]]


@dataclass
class Saving:
    """A checkpoint that is being written. finishing: of each role, that its part is whole, once that has been asked."""

    step: int
    content: dict[str, Any]
    finishing: list[Pending[Any]] | None = None


@dataclass
class Recorder:
    """Records metrics and commits checkpoints for the loop.

    A step's line is written once all that was expected of it has come: lines in the order of the steps, those up to a
    checkpoint, its own step's too, before it is committed: a run that goes on from it would never write them. What is
    asked of roles on a line's account is asked as its step ends, so that it does not have to wait for what they begin
    afterwards.

    roles: what a checkpoint holds, the one under training first: save(folder, wait), finish_save(), load().
    data: where samples come from: state(), load_state(). model: fingerprint of model.path (models/fingerprint.py).
    take_peaks: asks for bytes by role and operation since the last call. devices: that the role under training is on.
    on_commit: called when a checkpoint was committed. recoveries: of this run so far, which every line says.
    """

    writers: Writers
    console: RunConsole
    checkpoints: Checkpoints
    roles: Sequence[Any]
    data: Any
    model: str
    take_peaks: Callable[[], Pending[dict[str, int]]]
    devices: Devices
    async_save: bool
    stop: StopRequest
    on_commit: Callable[[], None] = lambda: None
    recoveries: int = 0
    _expected: dict[int, list[Coming]] = field(default_factory=dict)  # by step, of those that have not ended
    _lines: deque[Line] = field(default_factory=deque)  # not written yet
    _saving: Saving | None = None

    def expect(self, step: int, coming: Coming) -> None:
        """Metrics that belong to a step, and come when they come."""
        self._expected.setdefault(step, []).append(coming)

    def end_of(self, step: int, metrics: Metrics, failure: str = "") -> None:
        """A step is done: write its line, and those before it, where all that was expected of them is there.

        Then commit the checkpoint that it has written, unless that is still being written.
        failure: what is said of samples without a response or a grade.
        """
        self._lines.append(Line(step, metrics, failure, self._expected.pop(step, []), self.take_peaks()))
        if self._saving is not None and self._saving.step < step and self._saving.finishing is None:
            self._saving.finishing = [role.finish_save() for role in self.roles]
        while self._lines and all(coming.poll() is not None for coming in self._lines[0].coming):
            self._write(self._lines.popleft())
        if self._saving is not None and not self.async_save:
            self.finish()

    def _write(self, line: Line) -> None:
        """Write one step's metrics everywhere. A checkpoint of an earlier step has had that long to be written."""
        if self._saving is not None and self._saving.step < line.step:
            self._commit()
        metrics, failure = dict(line.metrics), line.failure
        for coming in line.coming:
            come = coming.wait()
            if isinstance(come, EvalResult):
                metrics, failure = metrics | come.metrics, failure or come.failure
            else:
                metrics = with_epoch(metrics, come)
        peaks = {f"memory/{name}": float(held) for name, held in line.peaks.wait().items()}
        metrics |= {
            **peaks,
            **_flop_rates(metrics, self.devices),
            **({"perf/rank_peak_bytes": max(peaks.values())} if peaks else {}),  # none where ranks did nothing
            "perf/recoveries": float(self.recoveries),
            "perf/host_memory_bytes": float(psutil.virtual_memory().used),
        }
        self.writers.write(line.step, metrics)
        self.console.step(line.step, metrics, failure)

    def save(self, state: State) -> None:
        """Write a checkpoint, which the end of the step commits, or begin one, which the next step does.

        All that was expected until then comes first.
        """
        self.finish()
        content = {"weight_version": state.weight_version, "data": self.data.state(), "model": self.model}
        folders = self.checkpoints.begin(state.step, [role.name for role in self.roles])
        with self.checkpoints.naming(state.step):
            for role in self.roles:
                role.save(folders[role.name], wait=not self.async_save)
        self._saving = Saving(state.step, content)

    def stopping(self) -> bool:
        """Whether the run is to end with this step."""
        return self.stop.asked

    def finish(self) -> None:
        """Wait for all that is expected, write the lines of the steps that have ended, and commit what is being written."""
        while self._lines:
            self._write(self._lines.popleft())
        for coming in chain.from_iterable(self._expected.values()):
            coming.wait()
        self._commit()

    def _commit(self) -> None:
        """Commit the checkpoint that is being written; nothing where none is."""
        saving, self._saving = self._saving, None
        if saving is not None:
            with self.checkpoints.naming(saving.step):
                for each in saving.finishing or [role.finish_save() for role in self.roles]:
                    each.wait()
            self.checkpoints.commit(saving.step, saving.content)
            self.on_commit()

    def restore(self, committed: Committed | None) -> State:
        """Bring models and data to a checkpoint; a new run starts from nothing."""
        if committed is None:
            return State()
        for role in self.roles:
            role.load(committed.role(role.name))
        self.data.load_state(committed.state["data"])
        return State(committed.step, committed.state["weight_version"])


def _flop_rates(metrics: dict[str, float], devices: Devices) -> dict[str, float]:
    """How fast the actor's updates were. A step that it did not learn from had none, whatever they would have taken."""
    flops, seconds = metrics.get("perf/train_flops"), metrics.get("perf/update_s")
    if not flops or not seconds:
        return {} if flops is None else {"perf/train_flops": 0.0}
    rates = {"perf/tflops_per_device": flops / seconds / devices.num / 1e12}
    if devices.peak_tflops is not None:
        rates["perf/mfu"] = mfu(flops, seconds, devices.num, devices.peak_tflops * 1e12)
    return rates
