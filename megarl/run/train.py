"""What `megarl train` does: check, start, run the loop, leave the results.

Ray and the engines are imported only once a recipe has been accepted, so that a refusal takes no longer than the check.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megarl.core.protocols import State
from megarl.core.scratch import Scratch
from megarl.core.stop import StopRequest
from megarl.placement.apply import place
from megarl.recipe.layouts import kept_roles
from megarl.recipe.load import Loaded, load_recipe
from megarl.recipe.schema import Recipe
from megarl.report.history import METRICS_FILE
from megarl.run.begin import Open, end, finish, found, handles_of, opened, recorder_of
from megarl.run.cores import share_cores
from megarl.run.journal import begin_journal, check_journal, evaluations_before, trim_journal
from megarl.run.kept import Kept
from megarl.run.past_run import advice
from megarl.run.preflight import preflight
from megarl.run.recovery import Recoveries, live
from megarl.run.rewind import rewinding
from megarl.train import train

if TYPE_CHECKING:
    from megarl.cluster.roles import Role

CRITIC_EXPORT = "hf_critic"


def run_train(path: Path, overrides: list[str], resume: bool, go_on: bool, discard_journal: bool = False) -> None:
    """`megarl train`."""
    with StopRequest() as stop, Scratch.open() as scratch, Kept() as kept:
        loaded = load_recipe(path, overrides, Recipe)
        recoveries = Recoveries(loaded.recipe.cluster.max_recoveries, loaded.recipe.run.folder / METRICS_FILE)

        def life(again: bool) -> None:
            if again:
                _train(loaded, False, True, False, scratch, recoveries, kept, stop)
            else:
                _train(loaded, resume, go_on, discard_journal, scratch, recoveries, kept, stop)

        live(recoveries, life)


def _train(
    loaded: Loaded[Recipe],
    resume: bool,
    go_on: bool,
    discard_journal: bool,
    scratch: Scratch,
    recoveries: Recoveries,
    kept: Kept,
    stop: StopRequest,
) -> None:
    """Once, from its start to its end. loaded: the recipe as it was when the command was given."""
    reads = (keeps := resume or go_on) and not discard_journal  # also without a checkpoint: all steps are there then
    loaded, resume = found(loaded, resume, go_on, recoveries)
    known = evaluations_before(loaded) if reads else {}
    if loaded.recipe.placement.name is not None:
        loaded = loaded.with_recipe(place(loaded.recipe).recipe)
    checked = preflight(loaded.recipe, sources=loaded.sources, resume=resume, forgets=go_on)
    recipe = (loaded := share_cores(loaded)).recipe
    if reads:
        check_journal(recipe, checked.digests, checked.taught)
    predicted = place(recipe).predicted
    lines = [*checked.lines(), *([predicted.summary()] if predicted else [])]
    from megarl.run.session import train_session

    with opened(loaded, lines, checked.committed, stop, go_on, recovered=recoveries.again) as run:
        recoveries.tell()
        begin_journal(recipe, checked.digests, checked.taught, keeps=reads)  # this life has the folder now
        with run.timer.phase("start"):
            session = run.stack.enter_context(train_session(recipe, checked, run.timer, scratch, kept))
            recorder = recorder_of(
                run,
                recipe,
                checked.plan.devices,
                session,
                kept_roles(recipe),
                session.rollout,
                on_commit=lambda: trim_journal(recipe, run.checkpoints.committed(), session.rollout.samples.forget),
                recoveries=recoveries.total,
            )
            state = recorder.restore(run.committed)
            if keeps and recipe.train.journal:
                session.rollout.catch_up(known)
        recoveries.begun(run.stop)
        # Servers start with version 0. One that goes on has the versions that it would have had without the stop.
        first = State(state.step, max(1, state.weight_version))
        with run.timer.phase("sync"):
            before = session.sync.push(first.weight_version)
        if run.committed is None:
            if recipe.data.eval is not None and recipe.eval.before:
                with run.timer.phase("eval"):
                    recorder.expect(0, session.rollout.evaluate(0, first.weight_version))
            recorder.end_of(0, before)
        handles = handles_of(session, session.rollout, session.sync, recorder, run.timer)
        with rewinding(session.rollout.samples, run.checkpoints):
            end(recorder, train(handles, recipe, first), recipe)
        _finish(run, session.roles, recipe, placed=predicted is not None)


def _finish(run: Open, roles: Mapping[str, Role], recipe: Recipe, *, placed: bool) -> None:
    """What the run leaves: the policy's HF folder, and the critic's where there is one; what it says of its placement."""
    if recipe.critic is not None:
        with run.timer.phase("export"):
            source = (recipe.critic.path or recipe.model.path).resolve()
            roles["critic"].export(source, (recipe.run.folder / CRITIC_EXPORT).resolve())
    finish(run, roles["actor"], recipe)
    if placed and (line := advice(recipe.run.folder)) is not None:
        Console(markup=False).print(line, highlight=False, soft_wrap=True)
