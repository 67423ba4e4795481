"""What `megarl replay` does: trains from the journal of a run, by the loop of every run, without any server."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from megarl.core.errors import MegarlError, UserError
from megarl.core.pending import Finished
from megarl.core.protocols import Metrics, State
from megarl.core.scratch import Scratch
from megarl.core.stop import StopRequest
from megarl.core.types import EvalResult
from megarl.hub.recipe import localize
from megarl.placement.apply import place
from megarl.placement.workload import read_model
from megarl.recipe.layouts import kept_roles
from megarl.recipe.load import Loaded, load_recipe
from megarl.recipe.save import RECIPE_FILE
from megarl.recipe.schema import Recipe
from megarl.report.history import METRICS_FILE, Row, read_history
from megarl.run.begin import finish, handles_of, opened, recorder_of, say
from megarl.run.epochs import with_steps
from megarl.run.journal import changes
from megarl.run.model_check import with_linears
from megarl.run.preflight import RESULTS, preflight, reading
from megarl.run.replayable import (
    Replay,
    check_greedy,
    check_inputs,
    check_model,
    check_overrides,
    check_served,
    find_replay,
)
from megarl.train import train

if TYPE_CHECKING:
    from megarl.cluster.samples import Samples

# Metrics that weights and samples decide, and nothing else; what else there is has seconds, bytes or servers in it.
LEARNED = ("actor/", "critic/", "reward/")


@dataclass(frozen=True)
class Replayed:
    """Samples as the loop asks for them: those of a journal."""

    samples: Samples

    def next(self, step: int, weight_version: int) -> Any:
        """A step's samples."""
        return self.samples.next(step, weight_version)

    def advantages(self, batch: Any, columns: dict[str, Any]) -> Any:
        """What the updates learn from."""
        return self.samples.advantages(batch, columns)

    def evaluate(self, step: int, weight_version: int) -> Finished[EvalResult]:
        """Raises MegarlError: the recipe of a replay has no held-out rows."""
        raise MegarlError("A replay has no servers to evaluate with.")


class NoServers:
    """A weight sync of a run that has nobody to send weights to."""

    def push(self, weight_version: int) -> Metrics:
        """Nothing."""
        return {}


def run_replay(
    folder: Path, overrides: list[str], from_step: int | None, to_step: int | None, out: Path | None
) -> None:
    """`megarl replay`."""
    if not (folder / RECIPE_FILE).is_file():
        raise UserError(f"{folder} is no folder of a run: it has no {RECIPE_FILE}.")
    if out is not None and (there := [name for name in RESULTS if (out / name).exists()]):
        raise UserError(f"--out {out} already holds a run ({', '.join(there)}). Name another folder, or delete it.")
    check_overrides(overrides)
    replay = find_replay(folder, from_step, to_step)
    recorded = localize(load_recipe(folder / RECIPE_FILE, (), Recipe), read_model, say, run=folder)
    changed = load_recipe(folder / RECIPE_FILE, overrides, Recipe, recorded=True)
    loaded = localize(changed, read_model, say, run=folder)
    with reading():
        loaded = with_steps(with_linears(loaded))
    check_model(recorded.recipe, loaded.recipe, replay.start)
    check_greedy(recorded.recipe, loaded.recipe)
    check_served(recorded.recipe, loaded.recipe)
    if replay.last > loaded.recipe.train.steps:
        raise UserError(
            f"train.steps is {loaded.recipe.train.steps}, and step {replay.last} is to be replayed: set --to-step."
        )
    loaded = loaded.with_recipe(_own(loaded.recipe, out or _free(folder)))
    words = [str(folder), *overrides, *_option("--from-step", from_step), *_option("--to-step", to_step)]
    with StopRequest() as stop, Scratch.open() as scratch:
        _replay(loaded, replay, recorded.recipe, shlex.join(["megarl", "replay", *words]), scratch, stop)


def _own(recipe: Recipe, out: Path) -> Recipe:
    """The recipe of the replay: a folder of its own, and nothing that needs servers."""
    if recipe.placement.name is not None:
        recipe = place(recipe).recipe
    return recipe.model_copy(
        update={
            "run": recipe.run.model_copy(update={"dir": out.parent, "name": out.name}),
            "data": recipe.data.model_copy(update={"eval": None}),
        }
    )


def _free(folder: Path) -> Path:
    """The first of replay-1, replay-2 and so on that is not there yet."""
    number = 1
    while (folder / f"replay-{number}").exists():
        number += 1
    return folder / f"replay-{number}"


def _option(name: str, value: int | None) -> list[str]:
    return [] if value is None else [name, str(value)]


def _replay(
    loaded: Loaded[Recipe], replay: Replay, recorded: Recipe, again: str, scratch: Scratch, stop: StopRequest
) -> None:
    recipe = loaded.recipe
    checked = preflight(recipe, sources=loaded.sources, replays=True)
    check_inputs(replay, recipe, checked.rows, checked.digests)
    changed = changes(replay.folder, recorded, recipe)
    from megarl.run.session import replay_session

    with opened(loaded, [replay.told(), *changed, *checked.lines()], None, stop=stop, again=again) as run:
        with run.timer.phase("start"):
            session = run.stack.enter_context(replay_session(recipe, checked, replay.journal, run.timer, scratch))
            recorder = recorder_of(run, recipe, checked.plan.devices, session, kept_roles(recipe), session.samples)
            state = recorder.restore(replay.start)
        handles = handles_of(session, Replayed(session.samples), NoServers(), recorder, run.timer)
        # Learning rates are those of the whole run: only the loop ends with the last step of the replay.
        until = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": replay.last})})
        train(handles, until, State(state.step, max(1, state.weight_version)))
        recorder.finish()
        finish(run, session.roles["actor"], recipe)
    told = compared(read_history(replay.folder / METRICS_FILE), read_history(recipe.run.folder / METRICS_FILE))
    Console().print(told, highlight=False, soft_wrap=True, markup=False)


def compared(before: Sequence[Row], now: Sequence[Row]) -> str:
    """Whether steps that were made again learned the same, to the bit; the first difference where they did not."""
    known = {row["step"]: row for row in before}
    steps = [row for row in now if row["step"] in known]
    if not steps:
        return "The run's metrics.jsonl has none of these steps: there is nothing to compare them with."
    for row in steps:
        was = known[row["step"]]
        names = [name for name in sorted({*was, *row}) if name.startswith(LEARNED)]
        differing = [name for name in names if was.get(name) != row.get(name)]
        if differing:
            name = differing[0]
            return (
                f"The first difference to the run is in step {row['step']}: {name} was {was.get(name)} and is {row.get(name)}; "
                f"{len(differing)} of {len(names)} metrics of actor, critic and reward differ there."
            )
    return (
        f"All metrics of actor, critic and reward in the {len(steps)} steps are the run's, to the bit "
        f"(steps {steps[0]['step']} to {steps[-1]['step']})."
    )
