"""What `megarl eval` does."""

from __future__ import annotations

import json
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from rich.console import Console

from megarl.core.log import setup_logging
from megarl.core.scratch import Scratch
from megarl.core.timing import PhaseTimer
from megarl.hub.recipe import TRAIN, localize, names_of
from megarl.placement.workload import read_model
from megarl.recipe.load import load_recipe
from megarl.recipe.schema import Recipe
from megarl.run.begin import DRIVER_LOG, say
from megarl.run.devices import check_devices
from megarl.run.model_check import with_linears
from megarl.run.preflight import preflight_eval, reading


def run_eval(path: Path, overrides: list[str]) -> None:
    """`megarl eval`."""
    with Scratch.open() as scratch:
        _evaluate(path, overrides, scratch)


def _evaluate(path: Path, overrides: list[str], scratch: Scratch) -> None:
    loaded = load_recipe(path, overrides, Recipe)
    if names_of(loaded.recipe):
        check_devices(loaded.recipe)
    loaded = localize(loaded, read_model, say, skip=(TRAIN,))
    with reading():
        recipe = with_linears(loaded).recipe
    checked = preflight_eval(recipe)
    recipe = beside(recipe).model_copy(update={"teacher": None})  # it would be asked of what is trained on
    from megarl.run.session import eval_session

    folder = recipe.run.folder
    console = Console(markup=False)
    timer = PhaseTimer()
    with ExitStack() as stack:
        stack.enter_context(setup_logging(folder / DRIVER_LOG))
        console.print(f"{checked.eval_rows} held-out rows, model {recipe.model.path}", highlight=False)
        with console.status("starting the servers"):
            rollout = stack.enter_context(eval_session(recipe, checked, timer, folder, scratch))
        with console.status("answering and grading"), timer.phase("eval"):
            result = rollout.evaluate(0, 0).wait()
    (folder / "eval.json").write_text(json.dumps(result.metrics, indent=1))
    console.print(
        f"accuracy {result.accuracy:.3f}, reward {result.reward:.3f} over {result.num_samples} answers to "
        f"{result.num_prompts} prompts in {timer.totals['eval']:.1f} s; figures in {folder / 'eval.json'}",
        highlight=False,
    )
    if result.failure:
        console.print(result.failure, style="yellow", highlight=False, markup=False, soft_wrap=True)


def beside(recipe: Recipe) -> Recipe:
    """The recipe with a run of its own: NAME-eval beside NAME, or with a number where that is there already.

    Makes the new run's folder. Whatever an earlier run or evaluation left stays as it is.
    """
    for number in count(1):
        name = f"{recipe.run.name}-eval" + (f"-{number}" if number > 1 else "")
        run = recipe.run.model_copy(update={"name": name})
        try:
            run.folder.mkdir(parents=True)
        except FileExistsError:
            continue
        break
    return recipe.model_copy(update={"run": run})
