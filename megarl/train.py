"""The loop. It reads like the algorithm and schedules references; tokens never pass through it.

    generate -> grade (as samples finish) -> log-probs, values, scores of the roles -> advantages and returns
    -> critic update -> actor update -> verified weight sync

A critic with devices of its own learns while the next step's samples are generated: these need the actor alone.
Who the roles are, where they run and in how many processes is decided elsewhere (megarl/cluster). What each step does to
the weights is decided by pure functions (megarl/algorithms).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from megarl.core.timing import PhaseTimer
from megarl.core.types import BatchInfo, EvalResult
from megarl.recipe.schema import Recipe

# One reference a shard; what it refers to lives in the object store.
References = tuple[Any, ...]
Given_co = TypeVar("Given_co", covariant=True)


class Batch(Protocol):
    """A step's samples, as the driver sees them."""

    @property
    def info(self) -> BatchInfo:
        """Counts and metrics."""


class Pending(Protocol[Given_co]):
    """An operation that has begun."""

    def wait(self) -> Given_co: ...  # noqa: D102


Update = Pending[dict[str, float]]


class Learnable(Protocol):
    """What a step is learned from."""

    @property
    def columns(self) -> dict[str, References]:
        """Advantages, returns and the like."""

    @property
    def metrics(self) -> dict[str, float]:
        """How they came about."""


class Rollout(Protocol):
    """Generates, grades and packs; makes advantages; evaluates."""

    def generate(self, step: int, weight_version: int) -> Any: ...  # noqa: D102
    def advantages(self, batch: Any, columns: dict[str, References]) -> Learnable: ...  # noqa: D102
    def evaluate(self, step: int, weight_version: int) -> EvalResult: ...  # noqa: D102


class Role(Protocol):
    """A model that Megatron holds. Only the actor and the critic are updated."""

    def logprobs(self, batch: Any) -> Pending[References]: ...  # noqa: D102
    def values(self, batch: Any) -> Pending[References]: ...  # noqa: D102
    def update(self, batch: Any, columns: dict[str, References]) -> Pending[dict[str, float]]: ...  # noqa: D102
    def copy_from(self, other: Any) -> None: ...  # noqa: D102


class WeightSync(Protocol):
    """Moves the actor's weights to the servers and proves it."""

    def push(self, weight_version: int) -> dict[str, float]: ...  # noqa: D102


class Recorder(Protocol):
    """Commits checkpoints and records metrics; knows whether somebody has asked for the run to stop."""

    def record(self, step: int, metrics: dict[str, float], failure: str = "") -> None: ...  # noqa: D102
    def save(self, state: State) -> None: ...  # noqa: D102
    def stopping(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True)
class State:
    """What the driver owns: committed with every checkpoint."""

    step: int = 0  # steps done
    weight_version: int = 0  # only goes up


@dataclass(frozen=True)
class Handles:
    """Everybody in the run. Roles that the recipe does not ask for are None.

    critic_has_own_devices: whether the critic shares devices with neither the actor nor the servers.
    """

    rollout: Rollout
    actor: Role
    reference: Role | None
    critic: Role | None
    reward_model: Role | None
    teacher: Role | None
    sync: WeightSync
    recorder: Recorder
    timer: PhaseTimer
    critic_has_own_devices: bool = False


@dataclass(frozen=True)
class Done:
    """A step that is done, but for what the critic may still learn from it. failure: of its samples."""

    step: int
    metrics: dict[str, float]
    learning: Sequence[Update]
    failure: str


def due(step: int, every: int | None, last: int) -> bool:
    """Whether something that happens every so many steps, and at the last, happens at this one."""
    return step == last or (every is not None and step % every == 0)


def train(handles: Handles, recipe: Recipe, state: State) -> State:
    """Run the steps that are left, or those until a request to stop; returns the state after the last."""
    rollout, timer = handles.rollout, handles.timer
    done: Done | None = None
    for step in range(state.step + 1, recipe.train.steps + 1):
        with timer.step(step):
            with timer.phase("rollout"):
                batch = rollout.generate(step, state.weight_version)
            record(handles, done)
            failure = batch.info.failure
            columns = score(handles, recipe, batch)
            with timer.phase("advantages"):
                learnable = rollout.advantages(batch, columns)
            columns, metrics = columns | learnable.columns, dict(learnable.metrics)
            critic: list[Update] = []
            if handles.critic is not None and recipe.critic is not None:
                critic = [handles.critic.update(batch, columns) for _ in range(recipe.critic.epochs)]
            actor: list[Update] = []
            if recipe.critic is None or step > recipe.critic.warmup_steps:
                actor = [handles.actor.update(batch, columns) for _ in range(recipe.actor.epochs)]
            if not handles.critic_has_own_devices:
                metrics |= wait(timer, "critic", critic)
                critic = []
            metrics |= wait(timer, "update", actor)
            state = State(step, state.weight_version + 1)
            with timer.phase("sync"):
                metrics |= handles.sync.push(state.weight_version)
            every = recipe.reference.refresh_every
            if handles.reference is not None and every is not None and step % every == 0:
                with timer.phase("reference"):
                    handles.reference.copy_from(handles.actor)
            if recipe.data.eval is not None and due(step, recipe.eval.every, recipe.train.steps):
                with timer.phase("eval"):
                    held_out = rollout.evaluate(step, state.weight_version)
                metrics |= held_out.metrics
                failure = failure or held_out.failure
            stopping = handles.recorder.stopping()
            saving = stopping or due(step, recipe.train.save_every, recipe.train.steps)
            if saving:
                metrics |= wait(timer, "critic", critic)
                critic = []
                with timer.phase("save"):
                    handles.recorder.save(state)
        done = Done(step, metrics | batch.info.metrics | timer.metrics(batch.info.num_tokens), critic, failure)
        if not critic:
            record(handles, done)
            done = None
        if stopping:
            break
    return state


def wait(timer: PhaseTimer, phase: str, updates: Sequence[Update]) -> dict[str, float]:
    """What updates report."""
    metrics: dict[str, float] = {}
    for update in updates:
        with timer.phase(phase):
            metrics |= update.wait()
    return metrics


def record(handles: Handles, done: Done | None) -> None:
    """Record a step, once the critic has learned from it as well."""
    if done is not None:
        metrics = done.metrics | wait(handles.timer, "critic", done.learning)
        handles.recorder.record(done.step, metrics, done.failure)


def score(handles: Handles, recipe: Recipe, batch: Any) -> dict[str, References]:
    """What each role says of the step's samples, before anything learns from them; roles of different pools at once."""
    asked: dict[str, tuple[str, Pending[References]]] = {}
    if recipe.algorithm.old_logprobs == "trainer":
        asked["old_logprobs"] = "logprobs", handles.actor.logprobs(batch)
    if handles.reference is not None:
        asked["ref_logprobs"] = "reference", handles.reference.logprobs(batch)
    if handles.teacher is not None:
        asked["teacher_logprobs"] = "teacher", handles.teacher.logprobs(batch)
    if handles.critic is not None:
        asked["values"] = "values", handles.critic.values(batch)
    if handles.reward_model is not None:
        asked["scores"] = "reward_model", handles.reward_model.values(batch)
    columns = {}
    for name, (phase, pending) in asked.items():
        with handles.timer.phase(phase):
            columns[name] = pending.wait()
    return columns
