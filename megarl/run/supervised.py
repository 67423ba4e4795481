"""What `megarl sft`, `megarl rm` and `megarl dpo` do: check, start, run the loop, leave the results."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from megarl.recipe.load import load_recipe
from megarl.recipe.supervised import DpoRecipe, RmRecipe, SftRecipe
from megarl.run.begin import end, finish, opened, resumes
from megarl.run.preflight import preflight_supervised
from megarl.run.recorder import Recorder
from megarl.sft import SupervisedHandles, supervise

S = TypeVar("S", SftRecipe, RmRecipe, DpoRecipe)


def run_supervised(kind: type[S], path: Path, overrides: list[str], resume: bool, go_on: bool) -> None:
    """`megarl sft`, `megarl rm` and `megarl dpo`."""
    loaded = load_recipe(path, overrides, kind)
    recipe = loaded.recipe
    resume = resumes(recipe.run.folder, resume, go_on)
    checked = preflight_supervised(recipe, resume=resume)
    from megarl.run.session import supervised_session

    with opened(loaded, checked.lines(), resume) as run:
        with run.timer.phase("start"):
            session = run.stack.enter_context(supervised_session(recipe, checked, run.timer))
            recorder = Recorder(
                run.writers,
                run.console,
                run.checkpoints,
                [session.roles["actor"]],
                session.feeder,
                session.take_peaks,
                recipe.cluster,
                recipe.train.async_save,
                run.stop,
            )
            state = recorder.restore(run.committed)
        model, reference = session.roles["actor"], session.roles.get("reference")
        handles = SupervisedHandles(session.feeder, model, reference, recorder, run.timer)
        end(recorder, supervise(handles, recipe, state), recipe)
        finish(run, model, recipe)
