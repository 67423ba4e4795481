"""The supervised loop: demonstrations or preferences in, a better model out, on the same engine as reinforcement learning.

rows -> log-probs of the reference, where there is one -> update -> held-out rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from megarl.core.protocols import Batch, Pending, Recorder, References, State
from megarl.core.timing import PhaseTimer
from megarl.recipe.supervised import SupervisedRecipe
from megarl.train import due


class Feeder(Protocol):
    """Hands out packed rows."""

    def take(self, step: int) -> Batch: ...  # noqa: D102
    def held_out(self) -> Batch: ...  # noqa: D102


class Role(Protocol):
    """A model that Megatron holds. Only the one under training is updated and evaluated."""

    def logprobs(self, batch: Any) -> Pending[References]: ...  # noqa: D102
    def update(self, batch: Any, columns: dict[str, References]) -> Pending[dict[str, float]]: ...  # noqa: D102
    def evaluate(self, batch: Any, columns: dict[str, References]) -> Pending[dict[str, float]]: ...  # noqa: D102


@dataclass(frozen=True)
class SupervisedHandles:
    """Everybody in a supervised run. `reference` is None where the loss has none."""

    feeder: Feeder
    model: Role
    reference: Role | None
    recorder: Recorder
    timer: PhaseTimer


def supervise(handles: SupervisedHandles, recipe: SupervisedRecipe, state: State) -> State:
    """Run the steps that are left, or those until a request to stop; returns the state after the last."""
    timer = handles.timer
    held_out = handles.feeder.held_out() if recipe.data.eval is not None else None
    # Once: neither these rows nor the reference change.
    known = score(handles, held_out) if held_out is not None and state.step < recipe.train.steps else {}
    if held_out is not None and state.step == 0 and recipe.eval.before:
        handles.recorder.end_of(0, evaluate(handles, held_out, known))
    for step in range(state.step + 1, recipe.train.steps + 1):
        with timer.step(step):
            with timer.phase("data"):
                batch = handles.feeder.take(step)
            columns = score(handles, batch)
            with timer.phase("update"):
                metrics = handles.model.update(batch, columns).wait()
            state = State(step, state.weight_version + 1)
            if held_out is not None and due(step, recipe.eval.every, recipe.train.steps):
                metrics |= evaluate(handles, held_out, known)
            stopping = handles.recorder.stopping()
            if stopping or due(step, recipe.train.save_every, recipe.train.steps):
                with timer.phase("save"):
                    handles.recorder.save(state)
        handles.recorder.end_of(step, metrics | batch.info.metrics | timer.metrics(batch.info.num_tokens))
        if stopping:
            break
    return state


def score(handles: SupervisedHandles, batch: Batch) -> dict[str, References]:
    """What the reference says of the rows."""
    if handles.reference is None:
        return {}
    with handles.timer.phase("reference"):
        return {"ref_logprobs": handles.reference.logprobs(batch).wait()}


def evaluate(handles: SupervisedHandles, held_out: Batch, columns: dict[str, References]) -> dict[str, float]:
    """What the loss reports of the held-out rows: `rm/accuracy` is `rm/eval_accuracy` then."""
    with handles.timer.phase("eval"):
        metrics = handles.model.evaluate(held_out, columns).wait()
    return {name.replace("/", "/eval_"): value for name, value in metrics.items()}
