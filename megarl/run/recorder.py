"""Records metrics and commits checkpoints for the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from megarl.core.stop import StopRequest
from megarl.models.flops import mfu
from megarl.recipe.run import Cluster
from megarl.report.console import RunConsole
from megarl.report.writers import Writers
from megarl.train import State
from megarl.training.run_checkpoints import Checkpoints, Committed


@dataclass
class Recorder:
    """Records metrics and commits checkpoints for the loop."""

    writers: Writers
    console: RunConsole
    checkpoints: Checkpoints
    roles: Sequence[
        Any
    ]  # what a checkpoint holds, the one under training first: save(folder, wait), finish_save(), load()
    data: Any  # where samples come from: state()
    take_peaks: Callable[[], dict[str, int]]  # bytes by role and operation since the last call
    cluster: Cluster
    async_save: bool
    stop: StopRequest
    _pending: tuple[int, dict[str, Any]] | None = None  # a checkpoint that is being written: step and state

    def record(self, step: int, metrics: dict[str, float], failure: str = "") -> None:
        """Write one step's metrics everywhere. A checkpoint of an earlier step has had that long to be written.

        failure: what is said of samples without a response or a grade.
        """
        if self._pending is not None and self._pending[0] < step:
            self.finish()
        peaks = {f"memory/{name}": float(held) for name, held in self.take_peaks().items()}
        metrics = {
            **metrics,
            **peaks,
            **_flop_rates(metrics, self.cluster),
            "perf/rank_peak_bytes": max(peaks.values()),
            "perf/host_memory_bytes": float(psutil.virtual_memory().used),
        }
        self.writers.write(step, metrics)
        self.console.step(step, metrics, failure)

    def save(self, state: State) -> None:
        """Commit a checkpoint, or begin one that the next step commits."""
        self.finish()
        content = {"weight_version": state.weight_version, "data": self.data.state()}
        folders = self.checkpoints.begin(state.step, [role.name for role in self.roles])
        with self.checkpoints.naming(state.step):
            for role in self.roles:
                role.save(folders[role.name], wait=not self.async_save)
        self._pending = (state.step, content)
        if not self.async_save:
            self.finish()

    def stopping(self) -> bool:
        """Whether the run is to end with this step."""
        return self.stop.asked

    def finish(self) -> None:
        """Commit the checkpoint that is being written; nothing where none is."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with self.checkpoints.naming(pending[0]):
                for role in self.roles:
                    role.finish_save()
            self.checkpoints.commit(*pending)

    def restore(self, committed: Committed | None) -> State:
        """Bring models and data to a checkpoint; a new run starts from nothing."""
        if committed is None:
            return State()
        for role in self.roles:
            role.load(committed.role(role.name))
        self.data.load_state(committed.state["data"])
        return State(committed.step, committed.state["weight_version"])


def _flop_rates(metrics: dict[str, float], cluster: Cluster) -> dict[str, float]:
    """How fast the updates were, where there were some."""
    flops, seconds = metrics.get("perf/train_flops"), metrics.get("perf/update_s")
    if not flops or not seconds:
        return {}
    rates = {"perf/tflops_per_device": flops / seconds / cluster.devices / 1e12}
    if cluster.peak_tflops is not None:
        rates["perf/mfu"] = mfu(flops, seconds, cluster.devices, cluster.peak_tflops * 1e12)
    return rates
