"""How a run begins and ends: its folder, log, writers and console; the model, the picture and the table that it leaves."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from megarl.core.errors import StoppedError, UserError
from megarl.core.log import get_logger, setup_logging
from megarl.core.progress import forget_progress
from megarl.core.protocols import Handles, Rollout, State, WeightSync
from megarl.core.ray_env import started_again
from megarl.core.stop import StopRequest
from megarl.core.timing import PHASE_FILE, PhaseTimer, write_phase
from megarl.hub.recipe import localize, names_of
from megarl.models.fingerprint import fingerprint
from megarl.placement.workload import read_model
from megarl.recipe.load import Loaded
from megarl.recipe.save import save_recipe
from megarl.recipe.schema import AnyRecipe, Recipe, RecipeT
from megarl.report.console import Output, RunConsole
from megarl.report.curve import draw_curve
from megarl.report.history import METRICS_FILE, best_steps
from megarl.report.writers import Writers, open_writers
from megarl.run.ending import ending, writing
from megarl.run.epochs import counts_rows, in_steps, with_steps
from megarl.run.exported import EXPORT, check_note, note_export, note_older_export
from megarl.run.lock import check_unlocked, locked
from megarl.run.model_check import with_linears
from megarl.run.preflight import CHECKPOINTS, check_start, reading
from megarl.run.recorder import Devices, Recorder
from megarl.run.recovery import Recoveries
from megarl.training.run_checkpoints import Checkpoints, Committed

ADAPTER, CURVE, DRIVER_LOG = "adapter", "curve.png", "logs/driver.log"
PHASE = f"logs/{PHASE_FILE}"


log = get_logger(__name__)


@dataclass(frozen=True)
class Open:
    """A run that has begun: where its metrics go and what it resumes from."""

    console: RunConsole
    timer: PhaseTimer
    writers: Writers
    checkpoints: Checkpoints
    committed: Committed | None
    stop: StopRequest
    stack: ExitStack


def _checkpoints(recipe: AnyRecipe) -> Checkpoints:
    """Those of a run, kept as its recipe says."""
    folder, train = recipe.run.folder, recipe.train

    def best(steps: Sequence[int]) -> set[int]:
        keep = train.keep_best
        if keep is None:
            return set()
        lowest = keep.mode == "min"
        return best_steps(folder / METRICS_FILE, keep.metric, lowest=lowest, count=keep.count, steps=steps)

    return Checkpoints(folder / CHECKPOINTS, train.keep_last, train.keep_every, best)


@contextmanager
def opened(
    loaded: Loaded[RecipeT],
    lines: list[str],
    committed: Committed | None,
    stop: StopRequest,
    forgets: bool = False,
    again: str = "",
    recovered: bool = False,
) -> Iterator[Open]:
    """The run's folder, log, writers and console; closed in the end, whatever happens.

    Errors from within say how to go on; again: the command that makes it anew, where it is not one to go on with. forgets:
    what an earlier start left that came to no checkpoint, where this one goes on from none either. committed: what it goes on
    from, as its inputs were checked. stop: the request to end early, which may have come before. recovered: the run goes on by
    itself.
    """
    recipe = loaded.recipe
    folder = recipe.run.folder
    checkpoints = _checkpoints(recipe)
    with _taken(folder), ExitStack() as logs, ending(loaded, checkpoints, again) as early, ExitStack() as stack:
        committed = _still_newest(checkpoints, committed)
        checkpoints.sweep()  # a run that has done all of its steps commits nothing more
        out = Output(markup=False)
        for line in lines:
            out.print(line, highlight=False, soft_wrap=True)
        with writing(folder):
            check_note(folder)
            if forgets and committed is None:
                shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
                (folder / METRICS_FILE).unlink(missing_ok=True)
            if committed is not None:
                note_older_export(folder, committed.step)
            logs.enter_context(setup_logging(folder / DRIVER_LOG))
            forget_progress((folder / DRIVER_LOG).parent)
            resumed = committed.step if committed else None
            alone = recovered or started_again()
            writers = stack.enter_context(open_writers(folder, recipe, resumed_step=resumed, recovered=alone))
            # After the rows behind the checkpoint are gone: it is what their evaluations were made with.
            save_recipe(loaded, folder)
        console = stack.enter_context(RunConsole(recipe.run.name, recipe.train.steps, out))

        def on_phase(step: int | None, phase: str | None) -> None:
            console.phase(step, phase)
            try:
                write_phase(folder / PHASE, step, phase)
            except OSError as error:
                if not folder.is_dir():
                    with writing(folder):
                        raise
                # It is for people, who may have removed the logs, and a file system may fail for a moment: the run goes on.
                log.info("%s could not be written: %s", folder / PHASE, error.strerror or error)

        evaluates = not isinstance(recipe, Recipe)
        early.timer = PhaseTimer(on_phase=on_phase, on_progress=console.progress, ranks_evaluate=evaluates)
        try:
            yield Open(console, early.timer, writers, checkpoints, committed, stop, stack)
        except Exception as error:
            early.look(error)
            raise


def _still_newest(checkpoints: Checkpoints, found: Committed | None) -> Committed | None:
    """What the run goes on from, now that nobody else writes into its folder.

    found: what was read whole a moment ago. A large one takes minutes to read: only where there is another now, that is read.
    Raises UserError where there was none, and is one now: this process was to begin anew.
    """
    if found is None and (there := list(checkpoints.folder.glob("step_*"))):
        newest = max(there, key=lambda each: (len(each.name), each.name))  # step_1000000 is after step_999999
        raise UserError(
            f"{newest} has come while this process looked at its inputs: another one has written this run, and has ended. "
            "Go on with it by --resume, or choose another folder by run.name=... or run.dir=..."
        )
    if found is None or [each.folder for each in checkpoints.committed()[-1:]] == [found.folder]:
        return found
    return checkpoints.latest()


@contextmanager
def _taken(folder: Path) -> Iterator[None]:
    """Within the block, the run's folder is this process's. Raises UserError where it is another's."""
    with ExitStack() as stack:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder))
        yield


def resumes(folder: Path, resume: bool, go_on: bool) -> bool:
    """Whether the run starts from a checkpoint. go_on: where there is one."""
    with writing(folder):
        check_unlocked(folder)
        return any((folder / CHECKPOINTS).glob("step_*")) if go_on else resume


def found(
    loaded: Loaded[RecipeT], resume: bool, go_on: bool, recoveries: Recoveries | None = None
) -> tuple[Loaded[RecipeT], bool]:
    """The recipe with what its names, actor.lora.targets and epochs stand for, and whether the run goes on from a checkpoint.

    recoveries: of the run; rows that an earlier life has counted, all of them tokenised, are not counted again. Raises UserError.
    """
    if recoveries is not None and recoveries.steps is not None and counts_rows(loaded.recipe):
        loaded = in_steps(loaded, recoveries.steps)
    folder = loaded.recipe.run.folder
    resume = resumes(folder, resume, go_on)
    if names_of(loaded.recipe) or counts_rows(loaded.recipe):  # what can be refused before that, is
        check_start(loaded.recipe, resume=resume, forgets=go_on)
    loaded = localize(loaded, read_model, say, run=folder if resume else None)
    with reading():
        loaded = with_steps(with_linears(loaded))
    if recoveries is not None:
        recoveries.steps = loaded.recipe.train.steps
    return loaded, resume


def handles_of(session: Any, rollout: Rollout, sync: WeightSync, recorder: Recorder, timer: PhaseTimer) -> Handles:
    """Everybody in a run, as the loop takes them. session: one with roles and, where there are some, a critic and a teacher."""
    others = {name: session.roles.get(name) for name in ("reference", "reward_model")}
    return Handles(
        rollout,
        session.roles["actor"],
        **others,
        critic=session.critic,
        teacher=session.teacher,
        sync=sync,
        recorder=recorder,
        timer=timer,
    )


def recorder_of(
    run: Open,
    recipe: AnyRecipe,
    devices: int,
    session: Any,
    names: Sequence[str],
    data: Any,
    on_commit: Callable[[], None] = lambda: None,
    recoveries: int = 0,
) -> Recorder:
    """Who writes down what a run does. session: with roles, of which those named are kept. data and so on: as of Recorder."""
    return Recorder(
        run.writers,
        run.console,
        run.checkpoints,
        [session.roles[name] for name in names],
        data,
        fingerprint(recipe.model.path),
        session.take_peaks,
        Devices(devices, recipe.cluster.peak_tflops),
        recipe.train.async_save,
        run.stop,
        on_commit,
        recoveries,
    )


def say(line: str) -> None:
    """A line for the user before there is a console of the run."""
    Console().print(line, highlight=False, soft_wrap=True, markup=False)


def end(recorder: Recorder, state: State, recipe: AnyRecipe) -> None:
    """Write and commit what is not yet. Raises StoppedError where steps are left."""
    recorder.finish()
    if state.step < recipe.train.steps:
        raise StoppedError(
            f"stopped as it was asked to, after step {state.step} of {recipe.train.steps}, which is committed."
        )


def finish(run: Open, model: Any, recipe: AnyRecipe) -> None:
    """The picture, the HF folder and the table. Where the HF folder is, nothing is left to do: it comes last."""
    folder = recipe.run.folder
    draw_curve(folder / METRICS_FILE, folder / CURVE)
    with run.timer.phase("export"):
        if recipe.actor.lora is not None:
            model.export_adapters((folder / ADAPTER).resolve())
        model.export(recipe.model.path.resolve(), (folder / EXPORT).resolve())
    note_export(folder, run.checkpoints.committed()[-1].step)
    run.console.finish(run.timer, folder / METRICS_FILE, export=folder / EXPORT, curve=folder / CURVE)
