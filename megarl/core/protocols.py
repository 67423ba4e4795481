"""What the loops ask of everybody in a run. Who these are, and in how many processes, is decided elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from megarl.core.timing import PhaseTimer
from megarl.core.types import BatchInfo, EvalResult, MiniBatches

# One reference a shard; what it refers to lives in the object store.
References = tuple[Any, ...]
Metrics = dict[str, float]
Given_co = TypeVar("Given_co", covariant=True)


def with_epoch(metrics: Metrics, epoch: Metrics) -> Metrics:
    """A step's metrics with those of one more epoch of its samples: the last one's, and the optimizer steps left out in all."""
    left_out = {
        name: metrics[name] + count
        for name, count in epoch.items()
        if name in metrics and name.endswith("/skipped_steps")
    }
    return metrics | epoch | left_out


class Batch(Protocol):
    """A step's samples, as the driver sees them."""

    @property
    def info(self) -> BatchInfo:
        """Counts and metrics."""


class Pending(Protocol[Given_co]):
    """An operation that has begun."""

    def wait(self) -> Given_co:
        """What it gives, once it has ended."""

    def poll(self) -> Given_co | None:
        """What it gives, where it has ended; None while it goes on."""


# Metrics of a step that come by themselves: those of an update, or of an evaluation.
Coming = Pending[Metrics] | Pending[EvalResult]


class Learnable(Protocol):
    """What a step is learned from."""

    @property
    def columns(self) -> dict[str, References]:
        """Advantages, returns and the like."""

    @property
    def metrics(self) -> Metrics:
        """How they came about."""

    @property
    def learns(self) -> bool:
        """Whether the step is learned from; off, it is left out."""


class Rollout(Protocol):
    """Generates, grades and packs; makes advantages; evaluates."""

    def next(self, step: int, weight_version: int) -> Any:
        """The samples to learn from in this step: a Batch."""

    def advantages(self, batch: Any, columns: dict[str, References]) -> Learnable: ...  # noqa: D102

    def evaluate(self, step: int, weight_version: int) -> Pending[EvalResult]:
        """Begin to answer the held-out prompts; what has to end before the next samples ends in here."""


class Role(Protocol):
    """A model that Megatron holds. Only the actor is updated."""

    def logprobs(self, batch: Any, of: MiniBatches = "all") -> Pending[References]: ...  # noqa: D102
    def top(self, batch: Any, k: int) -> Pending[References]: ...  # noqa: D102
    def values(self, batch: Any) -> Pending[References]: ...  # noqa: D102
    def update(self, batch: Any, columns: dict[str, References]) -> Pending[Metrics]: ...  # noqa: D102
    def copy_from(self, other: Any) -> None: ...  # noqa: D102


class Teacher(Protocol):
    """The model that is distilled from: ranks hold it, or collectors have asked it."""

    def logprobs(self, batch: Any) -> Pending[References]: ...  # noqa: D102
    def top(self, batch: Any, k: int) -> Pending[References]: ...  # noqa: D102


class Critic(Protocol):
    """The model that values states. Its update may go on beside whatever does not need its devices."""

    def values(self, batch: Any) -> Pending[References]: ...  # noqa: D102
    def update(self, batch: Any, columns: dict[str, References]) -> Pending[Metrics]: ...  # noqa: D102


class WeightSync(Protocol):
    """Moves the actor's weights to the servers and proves it."""

    def push(self, weight_version: int) -> Metrics: ...  # noqa: D102


class Recorder(Protocol):
    """Commits checkpoints and records metrics; knows whether somebody has asked for the run to stop."""

    def expect(self, step: int, coming: Coming) -> None:
        """Metrics that belong to a step, and come when they come: its line waits for them, the loop does not."""

    def end_of(self, step: int, metrics: Metrics, failure: str = "") -> None:
        """A step is done; its line is written once everything is there that was expected of it.

        failure: what is said of samples without a response or a grade.
        """

    def save(self, state: State) -> None:
        """Commit a checkpoint of a step, once everything has come that was expected up to that step."""

    def stopping(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True)
class State:
    """What the driver owns: committed with every checkpoint."""

    step: int = 0  # steps done
    weight_version: int = 0  # only goes up


@dataclass(frozen=True)
class Handles:
    """Everybody in a run of reinforcement learning. Roles that the recipe does not ask for are None."""

    rollout: Rollout
    actor: Role
    reference: Role | None
    critic: Critic | None
    reward_model: Role | None
    teacher: Teacher | None
    sync: WeightSync
    recorder: Recorder
    timer: PhaseTimer
