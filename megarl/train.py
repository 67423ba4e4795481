"""The loop. It reads like the algorithm and schedules references; tokens never pass through it.

    samples, graded -> log-probs, values, scores of the roles -> advantages and returns
    -> critic update, actor update -> verified weight sync

It waits for what the next line needs. What a step's record alone needs (a critic that still learns, an evaluation that goes
on) is the recorder's to wait for. Who the roles are, where they run and in how many processes is decided elsewhere
(megarl/cluster). What each step does to the weights is decided by pure functions (megarl/algorithms).
"""

from __future__ import annotations

from typing import Any

from megarl.core.protocols import Handles, Metrics, Pending, References, State, with_epoch
from megarl.recipe.schema import Recipe
from megarl.recipe.scoring import asked_of_teacher, scored_first


def train(handles: Handles, recipe: Recipe, state: State) -> State:
    """Run the steps that are left, or those until a request to stop; returns the state after the last."""
    rollout, recorder, timer = handles.rollout, handles.recorder, handles.timer
    for step in range(state.step + 1, recipe.train.steps + 1):
        with timer.step(step):
            with timer.phase("rollout"):
                batch = rollout.next(step, state.weight_version)
            columns = score(handles, recipe, batch)
            with timer.phase("advantages"):
                learnable = rollout.advantages(batch, columns)
            metrics = batch.info.metrics | learnable.metrics
            if learnable.learns:
                metrics |= update(handles, recipe, step, batch, columns | learnable.columns)
            state = State(step, state.weight_version + 1)
            with timer.phase("sync"):
                metrics |= handles.sync.push(state.weight_version)
            if handles.reference is not None and due(step, recipe.reference.refresh_every):
                with timer.phase("reference"):
                    handles.reference.copy_from(handles.actor)
            if recipe.data.eval is not None and due(step, recipe.eval.every, recipe.train.steps):
                with timer.phase("eval"):
                    recorder.expect(step, rollout.evaluate(step, state.weight_version))
            stopping = recorder.stopping()
            if stopping or due(step, recipe.train.save_every, recipe.train.steps):
                with timer.phase("save"):
                    recorder.save(state)
        recorder.end_of(step, metrics | timer.metrics(batch.info.num_tokens, recipe.actor.epochs), batch.info.failure)
        if stopping:
            break
    return state


def score(handles: Handles, recipe: Recipe, batch: Any) -> dict[str, References]:
    """What each role says of the step's samples, before anything learns from them; roles of different pools at once."""
    asked: dict[str, tuple[str, Pending[References]]] = {}
    if (of := scored_first(recipe)) is not None:
        asked["old_logprobs"] = "logprobs", handles.actor.logprobs(batch, of)
    if handles.reference is not None:
        asked["ref_logprobs"] = "reference", handles.reference.logprobs(batch)
    if handles.teacher is not None:
        of_samples, of_its_own = asked_of_teacher(recipe)
        if of_samples:
            asked["teacher_logprobs"] = "teacher", handles.teacher.logprobs(batch)
        if of_its_own:
            asked["teacher_top"] = "teacher", handles.teacher.top(batch, recipe.algorithm.distill_top_k)
    if handles.critic is not None:
        asked["values"] = "values", handles.critic.values(batch)
    if handles.reward_model is not None:
        asked["scores"] = "reward_model", handles.reward_model.values(batch)
    columns = {}
    for name, (phase, pending) in asked.items():
        with handles.timer.phase(phase):
            columns[name] = pending.wait()
    return columns


def update(handles: Handles, recipe: Recipe, step: int, batch: Any, columns: dict[str, References]) -> Metrics:
    """Let the critic and, once that is warm, the actor learn from a step; wait for the actor, whose weights come next."""
    if handles.critic is not None and recipe.critic is not None:
        for _ in range(recipe.critic.epochs):
            handles.recorder.expect(step, handles.critic.update(batch, columns))
        if step <= recipe.critic.warmup_steps:
            return {}
    metrics: Metrics = {}
    for learning in [handles.actor.update(batch, columns) for _ in range(recipe.actor.epochs)]:
        with handles.timer.phase("update"):
            metrics = with_epoch(metrics, learning.wait())
    return metrics


def due(step: int, every: int | None, last: int | None = None) -> bool:
    """Whether something that happens every so many steps, and at the last where it is given, happens at this one."""
    return step == last or (every is not None and step % every == 0)
