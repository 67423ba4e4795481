"""What `megarl sft`, `rm`, `dpo` and `kto` do: check, start, run the loop, leave the results."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from megarl.core.scratch import Scratch
from megarl.core.stop import StopRequest
from megarl.recipe.load import Loaded, load_recipe
from megarl.recipe.supervised import DpoRecipe, KtoRecipe, RmRecipe, SftRecipe
from megarl.report.history import METRICS_FILE
from megarl.run.begin import end, finish, found, opened, recorder_of
from megarl.run.preflight import preflight_supervised
from megarl.run.recovery import Recoveries, live
from megarl.sft import SupervisedHandles, supervise

S = TypeVar("S", SftRecipe, RmRecipe, DpoRecipe, KtoRecipe)


def run_supervised(kind: type[S], path: Path, overrides: list[str], resume: bool, go_on: bool) -> None:
    """`megarl sft`, `rm`, `dpo` and `kto`."""
    with StopRequest() as stop, Scratch.open() as scratch:
        loaded = load_recipe(path, overrides, kind)
        recoveries = Recoveries(loaded.recipe.cluster.max_recoveries, loaded.recipe.run.folder / METRICS_FILE)
        live(
            recoveries,
            lambda again: _supervise(loaded, resume and not again, go_on or again, scratch, recoveries, stop),
        )


def _supervise(
    loaded: Loaded[S], resume: bool, go_on: bool, scratch: Scratch, recoveries: Recoveries, stop: StopRequest
) -> None:
    loaded, resume = found(loaded, resume, go_on, recoveries)
    recipe = loaded.recipe
    checked = preflight_supervised(recipe, resume=resume, forgets=go_on)
    from megarl.run.session import supervised_session

    with opened(loaded, checked.lines(), checked.committed, stop, go_on, recovered=recoveries.again) as run:
        recoveries.tell()
        with run.timer.phase("start"):
            session = run.stack.enter_context(supervised_session(recipe, checked, run.timer, scratch))
            recorder = recorder_of(
                run,
                recipe,
                checked.plan.devices,
                session,
                ["actor"],
                session.feeder,
                recoveries=recoveries.total,
            )
            state = recorder.restore(run.committed)
        recoveries.begun(run.stop)
        model, reference = session.roles["actor"], session.roles.get("reference")
        handles = SupervisedHandles(session.feeder, model, reference, recorder, run.timer)
        end(recorder, supervise(handles, recipe, state), recipe)
        finish(run, model, recipe)
