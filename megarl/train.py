"""The loop. It reads like the algorithm and schedules references; tokens never pass through it.

    generate -> grade (as samples finish) -> old log-probs -> reference log-probs -> advantages -> update -> verified weight sync

Who the roles are, where they run and in how many processes is decided elsewhere (megarl/cluster). What each step does to
the weights is decided by pure functions (megarl/algorithms).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from megarl.core.timing import PhaseTimer
from megarl.core.types import BatchInfo, EvalResult
from megarl.recipe.schema import Recipe

# One reference a shard; what it refers to lives in the object store.
References = tuple[Any, ...]


class Batch(Protocol):
    """A step's samples, as the driver sees them."""

    @property
    def info(self) -> BatchInfo:
        """Counts and metrics."""


class Rollout(Protocol):
    """Generates, grades and packs; evaluates."""

    def generate(self, step: int, weight_version: int) -> Any: ...  # noqa: D102
    def advantages(self, batch: Any) -> References: ...  # noqa: D102
    def evaluate(self, step: int, weight_version: int) -> EvalResult: ...  # noqa: D102


class Actor(Protocol):
    """The policy under training."""

    def logprobs(self, batch: Any) -> References: ...  # noqa: D102
    def update(self, batch: Any, **columns: References) -> dict[str, float]: ...  # noqa: D102


class Reference(Protocol):
    """The frozen policy."""

    def logprobs(self, batch: Any) -> References: ...  # noqa: D102


class WeightSync(Protocol):
    """Moves the actor's weights to the servers and proves it."""

    def push(self, weight_version: int) -> dict[str, float]: ...  # noqa: D102


class Keeper(Protocol):
    """Commits checkpoints and records metrics."""

    def record(self, step: int, metrics: dict[str, float]) -> None: ...  # noqa: D102
    def save(self, state: State) -> None: ...  # noqa: D102


@dataclass(frozen=True)
class State:
    """What the driver owns: committed with every checkpoint."""

    step: int = 0  # steps done
    weight_version: int = 0  # only goes up


@dataclass(frozen=True)
class Cast:
    """Everybody in the run. `reference` is None where no KL asks for it."""

    rollout: Rollout
    actor: Actor
    reference: Reference | None
    sync: WeightSync
    keeper: Keeper
    timer: PhaseTimer


def due(step: int, every: int | None, last: int) -> bool:
    """Whether something that happens every so many steps, and at the last, happens at this one."""
    return step == last or (every is not None and step % every == 0)


def train(cast: Cast, recipe: Recipe, state: State) -> State:
    """Run the steps that are left; returns the state after the last."""
    rollout, actor, reference, timer = cast.rollout, cast.actor, cast.reference, cast.timer
    for step in range(state.step + 1, recipe.train.steps + 1):
        with timer.step(step):
            with timer.phase("rollout"):
                batch = rollout.generate(step, state.weight_version)
            columns: dict[str, References] = {}
            with timer.phase("logprobs"):
                columns["old_logprobs"] = actor.logprobs(batch)
            if reference is not None:
                with timer.phase("reference"):
                    columns["ref_logprobs"] = reference.logprobs(batch)
            with timer.phase("advantages"):
                columns["advantages"] = rollout.advantages(batch)
            for _ in range(recipe.actor.epochs):
                with timer.phase("update"):
                    metrics = actor.update(batch, **columns)
            state = State(step, state.weight_version + 1)
            with timer.phase("sync"):
                metrics |= cast.sync.push(state.weight_version)
            if recipe.data.eval is not None and due(step, recipe.eval.every, recipe.train.steps):
                with timer.phase("eval"):
                    metrics |= rollout.evaluate(step, state.weight_version).metrics
            if due(step, recipe.train.save_every, recipe.train.steps):
                with timer.phase("save"):
                    cast.keeper.save(state)
        cast.keeper.record(step, metrics | batch.info.metrics | timer.metrics(batch.info.num_tokens))
    return state
