"""What each command does: check, start, run the loop, leave the results. The command line itself is cli.py.

Ray and the engines are imported only once a recipe has been accepted, so that a refusal takes no longer than the check.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
from rich.console import Console
from rich.syntax import Syntax

from megarl.checkpoints import Checkpoints, Committed
from megarl.core.errors import StoppedError, UserError
from megarl.core.log import setup_logging
from megarl.core.stop import StopRequest
from megarl.core.timing import PhaseTimer
from megarl.hub.recipe import TRAIN, localize, names_of
from megarl.models.flops import mfu
from megarl.past_run import advice
from megarl.placement.apply import place
from megarl.placement.workload import read_model
from megarl.preflight import (
    CHECKPOINTS,
    check_devices,
    check_start,
    preflight,
    preflight_eval,
    preflight_supervised,
)
from megarl.recipe.batch import plan_batches
from megarl.recipe.layouts import kept_roles
from megarl.recipe.load import KINDS, Loaded, detect_kind, load_recipe
from megarl.recipe.run import Cluster
from megarl.recipe.save import save_recipe
from megarl.recipe.schema import AnyRecipe, Recipe
from megarl.recipe.source import dump_yaml
from megarl.recipe.supervised import DpoRecipe, RmRecipe, SftRecipe
from megarl.report.console import RunConsole
from megarl.report.curve import draw_curve
from megarl.report.history import METRICS_FILE
from megarl.report.writers import Writers, open_writers
from megarl.sft import SupervisedCast, supervise
from megarl.train import Cast, State, train

EXPORT, CRITIC_EXPORT, ADAPTER, CURVE, DRIVER_LOG = "hf", "hf_critic", "adapter", "curve.png", "logs/driver.log"

R = TypeVar("R", Recipe, SftRecipe, RmRecipe, DpoRecipe)
S = TypeVar("S", SftRecipe, RmRecipe, DpoRecipe)


@dataclass
class Keeper:
    """Records metrics and commits checkpoints for the loop."""

    writers: Writers
    console: RunConsole
    checkpoints: Checkpoints
    roles: Sequence[
        Any
    ]  # what a checkpoint holds, the one under training first: save(folder, wait), finish_save(), load()
    data: Any  # where samples come from: state()
    take_peaks: Callable[[], dict[str, int]]  # bytes by role and operation since the last call
    cluster: Cluster
    async_save: bool
    stop: StopRequest
    _pending: tuple[int, dict[str, Any]] | None = None  # a checkpoint that is being written: step and state

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Write one step's metrics everywhere. A checkpoint of an earlier step has had that long to be written."""
        if self._pending is not None and self._pending[0] < step:
            self.finish()
        peaks = {f"memory/{name}": float(held) for name, held in self.take_peaks().items()}
        metrics = {
            **metrics,
            **peaks,
            **_flop_rates(metrics, self.cluster),
            "perf/rank_peak_bytes": max(peaks.values()),
            "perf/host_memory_bytes": float(psutil.virtual_memory().used),
        }
        self.writers.write(step, metrics)
        self.console.step(step, metrics)

    def save(self, state: State) -> None:
        """Commit a checkpoint, or begin one that the next step commits."""
        self.finish()
        content = {"weight_version": state.weight_version, "data": self.data.state()}
        folders = self.checkpoints.begin(state.step, [role.name for role in self.roles])
        with self.checkpoints.naming(state.step):
            for role in self.roles:
                role.save(folders[role.name], wait=not self.async_save)
        self._pending = (state.step, content)
        if not self.async_save:
            self.finish()

    def stopping(self) -> bool:
        """Whether the run is to end with this step."""
        return self.stop.asked

    def finish(self) -> None:
        """Commit the checkpoint that is being written; nothing where none is."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with self.checkpoints.naming(pending[0]):
                for role in self.roles:
                    role.finish_save()
            self.checkpoints.commit(*pending)

    def restore(self, committed: Committed | None) -> State:
        """Bring models and data to a checkpoint; a new run starts from nothing."""
        if committed is None:
            return State()
        for role in self.roles:
            role.load(committed.role(role.name))
        self.data.load_state(committed.state["data"])
        return State(committed.step, committed.state["weight_version"])


def _flop_rates(metrics: dict[str, float], cluster: Cluster) -> dict[str, float]:
    """How fast the updates were, where there were some."""
    flops, seconds = metrics.get("perf/train_flops"), metrics.get("perf/update_s")
    if not flops or not seconds:
        return {}
    rates = {"perf/tflops_per_device": flops / seconds / cluster.devices / 1e12}
    if cluster.peak_tflops is not None:
        rates["perf/mfu"] = mfu(flops, seconds, cluster.devices, cluster.peak_tflops * 1e12)
    return rates


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


@contextmanager
def _opened(loaded: Loaded[R], lines: list[str], resume: bool) -> Iterator[Open]:
    """The run's folder, log, writers and console; closed in the end, whatever happens."""
    recipe = loaded.recipe
    folder = recipe.run.folder
    checkpoints = Checkpoints(folder / CHECKPOINTS, recipe.train.keep_last, recipe.train.keep_every)
    committed = checkpoints.latest() if resume else None
    save_recipe(loaded, folder)
    out = Console()
    for line in lines:
        out.print(line, highlight=False, soft_wrap=True)
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        stack.callback(setup_logging(folder / DRIVER_LOG).close)
        writers = open_writers(folder, recipe, resumed_step=committed.step if committed else None)
        stack.callback(writers.close)
        console = stack.enter_context(RunConsole(recipe.run.name, recipe.train.steps, out))
        yield Open(console, PhaseTimer(on_phase=console.phase), writers, checkpoints, committed, stop, stack)


def _resumes(folder: Path, resume: bool, go_on: bool) -> bool:
    """Whether the run starts from a checkpoint. go_on: where there is one; an earlier start without one is forgotten."""
    checkpoints = folder / CHECKPOINTS
    if not go_on or any(checkpoints.glob("step_*")):
        return resume or go_on
    shutil.rmtree(checkpoints, ignore_errors=True)
    (folder / METRICS_FILE).unlink(missing_ok=True)
    return False


def _found(loaded: Loaded[R], resume: bool, go_on: bool) -> tuple[Loaded[R], bool]:
    """The recipe with what its names stand for, and whether the run goes on from a checkpoint."""
    folder = loaded.recipe.run.folder
    resume = _resumes(folder, resume, go_on)
    if names_of(loaded.recipe):  # what can be refused without them is refused before anything is downloaded
        check_start(loaded.recipe, resume=resume)
    return localize(loaded, read_model, partial(_say, Console()), run=folder if resume else None), resume


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True, markup=False)


def run_train(path: Path, overrides: list[str], resume: bool, go_on: bool) -> None:
    """`megarl train`."""
    loaded, resume = _found(load_recipe(path, overrides, Recipe), resume, go_on)
    if loaded.recipe.placement.name is not None:
        loaded = loaded.with_recipe(place(loaded.recipe).recipe)
    recipe = loaded.recipe
    checked = preflight(recipe, sources=loaded.sources, resume=resume)
    predicted = place(recipe).predicted
    from megarl.session import train_session

    with _opened(loaded, [*checked.lines(), *([predicted.summary()] if predicted else [])], resume) as run:
        timer = run.timer
        with timer.phase("start"):
            session = run.stack.enter_context(train_session(recipe, checked, timer))
            keeper = Keeper(
                run.writers,
                run.console,
                run.checkpoints,
                [session.roles[name] for name in kept_roles(recipe)],
                session.rollout,
                session.take_peaks,
                recipe.cluster,
                recipe.train.async_save,
                run.stop,
            )
            state = keeper.restore(run.committed)
        first = State(state.step, state.weight_version + 1)
        with timer.phase("sync"):
            before = session.sync.push(first.weight_version)
        if run.committed is None:
            if recipe.data.eval is not None:
                with timer.phase("eval"):
                    before |= session.rollout.evaluate(0, first.weight_version).metrics
            keeper.record(0, before)
        roles = session.roles
        others = {name: roles.get(name) for name in ("reference", "critic", "reward_model", "teacher")}
        cast = Cast(
            session.rollout,
            roles["actor"],
            **others,
            sync=session.sync,
            keeper=keeper,
            timer=timer,
            critic_apart=session.critic_apart,
        )
        _end(keeper, train(cast, recipe, first), recipe)
        _finish(run, roles["actor"], recipe)
        if recipe.critic is not None:
            with timer.phase("export"):
                source = (recipe.critic.path or recipe.model.path).resolve()
                roles["critic"].export(source, (recipe.run.folder / CRITIC_EXPORT).resolve())
        if predicted is not None and (line := advice(recipe.run.folder)) is not None:
            Console().print(line, highlight=False, soft_wrap=True)


def run_supervised(kind: type[S], path: Path, overrides: list[str], resume: bool, go_on: bool) -> None:
    """`megarl sft`, `megarl rm` and `megarl dpo`."""
    loaded, resume = _found(load_recipe(path, overrides, kind), resume, go_on)
    recipe = loaded.recipe
    checked = preflight_supervised(recipe, resume=resume)
    from megarl.session import supervised_session

    with _opened(loaded, checked.lines(), resume) as run:
        with run.timer.phase("start"):
            session = run.stack.enter_context(supervised_session(recipe, checked, run.timer))
            keeper = Keeper(
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
            state = keeper.restore(run.committed)
        model, reference = session.roles["actor"], session.roles.get("reference")
        cast = SupervisedCast(session.feeder, model, reference, keeper, run.timer)
        _end(keeper, supervise(cast, recipe, state), recipe)
        _finish(run, model, recipe)


def _end(keeper: Keeper, state: State, recipe: AnyRecipe) -> None:
    """Commit what is being written. Raises StoppedError where steps are left."""
    keeper.finish()
    if state.step < recipe.train.steps:
        raise StoppedError(
            f"stopped as it was asked to, after step {state.step} of {recipe.train.steps}, which is committed. Go on with "
            "it by --resume."
        )


def _finish(run: Open, model: Any, recipe: AnyRecipe) -> None:
    """The HF folder, the picture and the table."""
    folder = recipe.run.folder
    with run.timer.phase("export"):
        model.export(recipe.model.path.resolve(), (folder / EXPORT).resolve())
        if recipe.actor.lora is not None:
            model.export_adapters((folder / ADAPTER).resolve())
    draw_curve(folder / METRICS_FILE, folder / CURVE)
    run.console.finish(run.timer, folder / METRICS_FILE, export=folder / EXPORT, curve=folder / CURVE)


def run_eval(path: Path, overrides: list[str]) -> None:
    """`megarl eval`."""
    loaded = load_recipe(path, overrides, Recipe)
    if names_of(loaded.recipe):
        check_devices(loaded.recipe)
    console = Console()
    recipe = localize(loaded, read_model, partial(_say, console), skip=(TRAIN,)).recipe
    checked = preflight_eval(recipe)
    from megarl.session import eval_session

    folder = recipe.run.dir / f"{recipe.run.name}-eval"
    timer = PhaseTimer()
    with ExitStack() as stack:
        stack.callback(setup_logging(folder / DRIVER_LOG).close)
        console.print(f"{checked.eval_rows} held-out rows, model {recipe.model.path}", highlight=False)
        with console.status("starting the servers"):
            rollout = stack.enter_context(eval_session(recipe, checked, timer, folder))
        with console.status("answering and grading"), timer.phase("eval"):
            result = rollout.evaluate(0, 0)
    (folder / "eval.json").write_text(json.dumps(result.metrics, indent=1))
    console.print(
        f"accuracy {result.accuracy:.3f}, reward {result.reward:.3f} over {result.num_samples} answers to "
        f"{result.num_prompts} prompts in {timer.totals['eval']:.1f} s; figures in {folder / 'eval.json'}",
        highlight=False,
    )


def show_recipe(path: Path, overrides: list[str], kind: str) -> None:
    """`megarl recipe show`."""
    if kind and kind not in KINDS:
        raise UserError(f"--kind {kind}: there is no such command. Choose among {', '.join(KINDS)}.")
    chosen: Any = KINDS[kind] if kind else detect_kind(path, overrides)
    loaded: Loaded[Any] = load_recipe(path, overrides, chosen)
    console = Console()
    console.print(Syntax(dump_yaml(loaded.resolved), "yaml", background_color="default"))
    console.print(plan_batches(loaded.recipe).describe(), highlight=False)
