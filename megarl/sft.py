"""The supervised loop: demonstrations or preferences in, a better model out, on the same engine as reinforcement learning.

rows -> log-probs of the reference, where there is one -> update -> held-out rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from megarl.core.timing import PhaseTimer
from megarl.recipe.supervised import SupervisedRecipe
from megarl.train import Batch, Keeper, Pending, References, State, due


class Feeder(Protocol):
    """Deals out packed rows."""

    def take(self, step: int) -> Batch: ...  # noqa: D102
    def held_out(self) -> Batch: ...  # noqa: D102


class Role(Protocol):
    """A model that Megatron holds. Only the one under training is updated and evaluated."""

    def logprobs(self, batch: Any) -> Pending[References]: ...  # noqa: D102
    def update(self, batch: Any, columns: dict[str, References]) -> Pending[dict[str, float]]: ...  # noqa: D102
    def evaluate(self, batch: Any, columns: dict[str, References]) -> Pending[dict[str, float]]: ...  # noqa: D102


@dataclass(frozen=True)
class SupervisedCast:
    """Everybody in a supervised run. `reference` is None where the loss has none."""

    feeder: Feeder
    model: Role
    reference: Role | None
    keeper: Keeper
    timer: PhaseTimer


def supervise(cast: SupervisedCast, recipe: SupervisedRecipe, state: State) -> State:
    """Run the steps that are left, or those until a request to stop; returns the state after the last."""
    timer = cast.timer
    held_out = cast.feeder.held_out() if recipe.data.eval is not None else None
    if held_out is not None and state.step == 0:
        cast.keeper.record(0, evaluate(cast, held_out))
    for step in range(state.step + 1, recipe.train.steps + 1):
        with timer.step(step):
            with timer.phase("data"):
                batch = cast.feeder.take(step)
            columns = score(cast, batch)
            with timer.phase("update"):
                metrics = cast.model.update(batch, columns).wait()
            state = State(step, state.weight_version + 1)
            if held_out is not None and due(step, recipe.eval.every, recipe.train.steps):
                metrics |= evaluate(cast, held_out)
            stopping = cast.keeper.stopping()
            if stopping or due(step, recipe.train.save_every, recipe.train.steps):
                with timer.phase("save"):
                    cast.keeper.save(state)
        cast.keeper.record(step, metrics | batch.info.metrics | timer.metrics(batch.info.num_tokens))
        if stopping:
            break
    return state


def score(cast: SupervisedCast, batch: Batch) -> dict[str, References]:
    """What the reference says of the rows."""
    if cast.reference is None:
        return {}
    with cast.timer.phase("reference"):
        return {"ref_logprobs": cast.reference.logprobs(batch).wait()}


def evaluate(cast: SupervisedCast, held_out: Batch) -> dict[str, float]:
    """What the loss reports of the held-out rows: `rm/accuracy` is `rm/eval_accuracy` then."""
    columns = score(cast, held_out)
    with cast.timer.phase("eval"):
        metrics = cast.model.evaluate(held_out, columns).wait()
    return {name.replace("/", "/eval_"): value for name, value in metrics.items()}
