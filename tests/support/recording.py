"""A run's recorder whose writers, console, checkpoints and roles write down what they are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.core.pending import Finished
from megarl.core.protocols import State
from megarl.run.recorder import Devices, Recorder


@dataclass(frozen=True)
class Slow:
    """What has begun and goes on until it is waited for."""

    name: str
    calls: list[Any]
    result: Any = None
    error: Exception | None = None

    def wait(self) -> Any:
        self.calls.append(("wait", self.name))
        if self.error is not None:
            raise self.error
        return self.result

    def poll(self) -> Any:
        return None


@dataclass
class Told:
    """What a recorder tells its writers, console, checkpoints and one role, in this order in `calls`."""

    calls: list[Any]
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    name: str = "actor"
    peaks: int = 0  # how often they have been asked for

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("record", step))
        self.metrics[step] = dict(metrics)

    def step(self, number: int, metrics: Mapping[str, float], failure: str) -> None:
        self.failures.append(failure)

    def begin(self, step: int, roles: list[str]) -> dict[str, Path]:
        return {role: Path(role) for role in roles}

    def naming(self, step: int) -> AbstractContextManager[None]:
        return nullcontext()

    def commit(self, step: int, content: dict[str, Any]) -> None:
        self.calls.append(("save", State(step, content["weight_version"])))

    def save(self, folder: Path, *, wait: bool) -> None:
        if not wait:
            self.calls.append("written later")

    def finish_save(self) -> Finished[list[None]]:
        if "written later" in self.calls:
            self.calls.append("asked whether it is whole")
        return Finished([None])

    def state(self) -> dict[str, Any]:
        return {}


class Asked:
    """A request to stop, once a condition holds."""

    def __init__(self, when: Callable[[], bool]) -> None:
        self._when = when

    @property
    def asked(self) -> bool:
        return self._when()


def recorder_of(
    told: Told, *, stop: Callable[[], bool] = lambda: False, async_save: bool = False, devices: int = 1
) -> Recorder:
    """The recorder that a run has, with everything around it told. devices: of the actor's pool, each good for 4 TFLOP/s."""
    around: Any = told
    asked: Any = Asked(stop)

    def take_peaks() -> Finished[dict[str, int]]:
        told.peaks += 1
        return Finished({"actor/update": told.peaks})

    return Recorder(around, around, around, [told], told, "model", take_peaks, Devices(devices, 4.0), async_save, asked)
