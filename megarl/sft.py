"""The supervised loop: demonstrations in, a better model out, on the same engine as reinforcement learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from megarl.core.timing import PhaseTimer
from megarl.recipe.supervised import SftRecipe
from megarl.train import Keeper, State, due


class Feeder(Protocol):
    """Deals out packed demonstrations."""

    def take(self, step: int) -> Any: ...  # noqa: D102


class Model(Protocol):
    """The model under training."""

    def update(self, batch: Any) -> dict[str, float]: ...  # noqa: D102


@dataclass(frozen=True)
class SftCast:
    """Everybody in a supervised run."""

    feeder: Feeder
    model: Model
    keeper: Keeper
    timer: PhaseTimer


def sft(cast: SftCast, recipe: SftRecipe, state: State) -> State:
    """Run the steps that are left, or those until a request to stop; returns the state after the last."""
    timer = cast.timer
    for step in range(state.step + 1, recipe.train.steps + 1):
        with timer.step(step):
            with timer.phase("data"):
                batch = cast.feeder.take(step)
            with timer.phase("update"):
                metrics = cast.model.update(batch)
            state = State(step, state.weight_version + 1)
            stopping = cast.keeper.stopping()
            if stopping or due(step, recipe.train.save_every, recipe.train.steps):
                with timer.phase("save"):
                    cast.keeper.save(state)
        cast.keeper.record(step, metrics | batch.info.metrics | timer.metrics(batch.info.num_tokens))
        if stopping:
            break
    return state
