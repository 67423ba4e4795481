"""The supervised loop: demonstrations or preferences in, a better model out, on the same engine as reinforcement learning.

rows -> log-probs of the reference, where there is one -> KL to it, for KTO -> update -> held-out rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from megarl.core.protocols import Batch, Pending, Recorder, References, State
from megarl.core.timing import PhaseTimer
from megarl.recipe.supervised import SupervisedRecipe
from megarl.train import due

Columns = dict[str, References]


class Rows(Batch, Protocol):
    """Packed rows."""

    @property
    def mismatched(self) -> Batch | None:
        """Prompts of labelled answers before the answers of other rows (data/unpaired); None where rows are no such answers."""


class Feeder(Protocol):
    """Hands out packed rows."""

    def take(self, step: int) -> Rows: ...  # noqa: D102
    def held_out(self) -> Rows: ...  # noqa: D102


class Role(Protocol):
    """A model that Megatron holds. Only the one under training is updated and evaluated."""

    def logprobs(self, batch: Any) -> Pending[References]: ...  # noqa: D102
    def update(self, batch: Any, columns: Columns, kl: float) -> Pending[dict[str, float]]: ...  # noqa: D102
    def evaluate(self, batch: Any, columns: Columns, kl: float) -> Pending[dict[str, float]]: ...  # noqa: D102


@dataclass(frozen=True)
class SupervisedHandles:
    """Everybody in a supervised run. `reference` is None where the loss has none."""

    feeder: Feeder
    model: Role
    reference: Role | None
    recorder: Recorder
    timer: PhaseTimer


@dataclass(frozen=True)
class Scored:
    """Rows, and what the reference says of them and of the mismatched ones."""

    rows: Rows
    columns: Columns
    mismatched: Columns


def supervise(handles: SupervisedHandles, recipe: SupervisedRecipe, state: State) -> State:
    """Run the steps that are left, or those until a request to stop; returns the state after the last."""
    timer = handles.timer
    held_out = handles.feeder.held_out() if recipe.data.eval is not None else None
    # Once: neither these rows nor the reference change.
    known = score(handles, held_out) if held_out is not None and state.step < recipe.train.steps else None
    if known is not None and state.step == 0 and recipe.eval.before:
        handles.recorder.end_of(0, evaluate(handles, known))
    for step in range(state.step + 1, recipe.train.steps + 1):
        with timer.step(step):
            with timer.phase("data"):
                batch = handles.feeder.take(step)
            scored = score(handles, batch)
            kl = estimate_kl(handles, scored)
            with timer.phase("update"):
                metrics = handles.model.update(batch, scored.columns, kl).wait()
            state = State(step, state.weight_version + 1)
            if known is not None and due(step, recipe.eval.every, recipe.train.steps):
                metrics |= evaluate(handles, known)
            stopping = handles.recorder.stopping()
            if stopping or due(step, recipe.train.save_every, recipe.train.steps):
                with timer.phase("save"):
                    handles.recorder.save(state)
        handles.recorder.end_of(step, metrics | batch.info.metrics | timer.metrics(batch.info.num_tokens))
        if stopping:
            break
    return state


def score(handles: SupervisedHandles, rows: Rows) -> Scored:
    """What the reference says of the rows."""
    columns: list[Columns] = []
    for batch in (rows, rows.mismatched):
        if handles.reference is None or batch is None:
            columns.append({})
            continue
        with handles.timer.phase("reference"):
            columns.append({"ref_logprobs": handles.reference.logprobs(batch).wait()})
    return Scored(rows, *columns)


def estimate_kl(handles: SupervisedHandles, scored: Scored) -> float:
    """KTO's estimate of the policy's KL to the reference, nats: mean log-ratio of the mismatched rows, at least 0.

    Over all rows on all ranks, before they are learned from (arXiv 2402.01306, section 4.1). 0 where there are no such rows.
    """
    if scored.rows.mismatched is None:
        return 0.0
    with handles.timer.phase("logprobs"):
        metrics = handles.model.evaluate(scored.rows.mismatched, scored.mismatched, 0.0).wait()
    kl = metrics["kto/log_ratio"]
    return 0.0 if kl < 0 else kl  # what is no number stays none


def evaluate(handles: SupervisedHandles, held_out: Scored) -> dict[str, float]:
    """What the loss reports of the held-out rows: `rm/accuracy` is `rm/eval_accuracy` then."""
    kl = estimate_kl(handles, held_out)
    with handles.timer.phase("eval"):
        metrics = handles.model.evaluate(held_out.rows, held_out.columns, kl).wait()
    return {name.replace("/", "/eval_"): value for name, value in metrics.items()}
