"""`megarl submit`: checks a recipe here, and hands the run to SLURM or to a Ray cluster."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megarl.core.errors import UserError
from megarl.core.platform import Platform
from megarl.hub.recipe import localize, names_of
from megarl.launch import slurm
from megarl.launch.fit import check_fit
from megarl.launch.ray_jobs import RayJobs, TokenError
from megarl.launch.record import EVENTS, FILE, FOLDER, Submission, last_submission
from megarl.launch.script import TEMPLATE, SlurmJob, render
from megarl.launch.watch import is_alive
from megarl.placement.workload import read_model
from megarl.recipe.load import Loaded, command_of, detect_kind, load_recipe
from megarl.recipe.schema import AnyRecipe, Recipe
from megarl.recipe.source import dump_yaml
from megarl.report.history import METRICS_FILE
from megarl.run.ending import SUBMITTED_BY, writing
from megarl.run.epochs import counts_rows, with_steps
from megarl.run.lock import locked
from megarl.run.model_check import with_linears
from megarl.run.preflight import check_start, preflight, preflight_supervised, reading

Say = Callable[[str], object]
# What is left of a socket's path: /megarl-JOB-RESTART/session_DATE_TIME_MICROSECONDS_PID/sockets/plasma_store
LONGEST_TEMP = 107 - len("/megarl-12345678-99/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")

# Of sbatch's --signal: it refuses the job otherwise.
MOST_GRACE_S = 65535

# The option of sbatch's that names other clusters than the one that is here.
OF_CLUSTERS = re.compile(r"--clusters?\b(?!-)|-M")


@dataclass(frozen=True)
class SlurmOptions:
    """What the command line says of the job. Times and sizes are in SLURM's own words."""

    nodes: int = 1
    gpus_per_node: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    cpus_per_task: int | None = None
    memory: str | None = None
    exclude: str | None = None
    grace_s: int = 300
    start_s: int = 600
    temp: Path = Path("/tmp")
    setup: str | None = None
    template: Path = TEMPLATE
    extra: tuple[str, ...] = ()


def submit_slurm(
    path: Path,
    overrides: Sequence[str],
    options: SlurmOptions,
    *,
    resume: bool,
    dry_run: bool,
    say: Say,
    again: str = "",
) -> Path:
    """Check, render and submit; returns the run's folder. Raises UserError before anything is submitted or written.

    dry_run: say the script instead. again: the command that submits it, for who goes on with it.
    """
    _check_times(options)
    _check_temp(options.temp)
    if not dry_run:
        slurm.require()
        # Of another cluster's partitions the one that is here knows nothing; sbatch refuses what has to be.
        elsewhere = os.environ.get("SBATCH_CLUSTERS") or any(map(OF_CLUSTERS.match, options.extra))
        if options.partition is not None and not elsewhere:
            slurm.check_partition(options.partition)
    loaded, platform = _checked(path, overrides, "cuda" if options.gpus_per_node else "cpu", resume, dry_run, say)
    recipe = loaded.recipe
    fit = check_fit(recipe, options.nodes, options.gpus_per_node)
    run: Path = recipe.run.folder.absolute()
    script = render(_slurm_job(recipe, platform, options, fit.per_node, run), options.template)
    if dry_run:
        say(script)
        if fit.servers:
            say(f"# {recipe.run.name}: {fit.servers}.")  # what is printed is still a script
        return run
    folder = run / FOLDER
    with _alone(run):
        (folder / "recipe.yaml").write_text(
            f"# Resolved from {path} when it was submitted.\n{dump_yaml(loaded.resolved)}"
        )
        (folder / SUBMITTED_BY).unlink(missing_ok=True)
        if again:
            (folder / SUBMITTED_BY).write_text(f"{again}\n")
        (folder / "slurm.sbatch").write_text(script)
        job, cluster = slurm.submit(folder / "slurm.sbatch")
        log = folder / f"slurm-{job}.out"
        Submission("slurm", job, address=cluster, log=str(log)).write(run)
    servers = f", {fit.servers}" if fit.servers else ""
    say(f"SLURM job {job}: {recipe.run.name} on {options.nodes} nodes{servers}; it prints to {log}")
    return run


def submit_ray(
    path: Path, overrides: Sequence[str], address: str, working_dir: Path, *, resume: bool, dry_run: bool, say: Say
) -> Path:
    """Check, pack `working_dir` and queue the run on a Ray cluster; returns the run's folder. Raises UserError before.

    dry_run: say the command instead.
    """
    loaded, _ = _checked(path, overrides, None, resume, dry_run, say)
    run: Path = loaded.recipe.run.folder
    _check_paths(loaded.recipe, path, working_dir)
    recipe = str(path.absolute().relative_to(working_dir.absolute()))
    # What was checked here, at its commit: the cluster has a cache of its own.
    named = [f"{key}={name}" for key, name in loaded.names.items()]
    words = ["python", "-m", "megarl", _command(loaded.recipe), recipe, *overrides, *named, "--continue"]
    entrypoint = f"exec {shlex.join(words)}"
    if dry_run:
        say(entrypoint)
        return run
    jobs = RayJobs(address)
    with _alone(run):
        job = jobs.submit(entrypoint, working_dir, loaded.recipe.run.name)
        Submission("ray", job, address=address).write(run)
    say(f"Ray job {job} at {address}: {loaded.recipe.run.name}")
    return run


def _checked(
    path: Path,
    overrides: Sequence[str],
    platform: Literal["cpu", "cuda"] | None,
    resume: bool,
    dry_run: bool,
    say: Say,
) -> tuple[Loaded[Any], Platform]:
    """The recipe, checked as far as it can be where it will not run. platform: of the nodes; None: the recipe's."""
    kind = detect_kind(path, overrides)
    loaded: Loaded[Any] = load_recipe(path, overrides, kind)
    said = loaded.recipe.cluster.platform
    if platform is not None and said == "auto":
        loaded = load_recipe(path, [*overrides, f"cluster.platform={platform}"], kind)
    elif platform is not None and said != platform:
        raise UserError(
            f"cluster.platform is {said}, and the job would run on {platform}: GPUs are asked for by --gpus-per-node, and "
            "a job without it runs on CPUs. Let both say the same."
        )
    if not dry_run:
        _refuse_second(loaded.recipe.run.folder)
    run = loaded.recipe.run.folder
    if names_of(loaded.recipe) or counts_rows(loaded.recipe):
        check_start(loaded.recipe, resume=resume, here=False)
    loaded = localize(loaded, read_model, say, run=run if resume else None)
    with reading():
        loaded = with_steps(with_linears(loaded))
    if kind is Recipe:
        checked = preflight(loaded.recipe, sources=loaded.sources, resume=resume, here=False)
    else:
        checked = preflight_supervised(loaded.recipe, resume=resume, here=False)
    return loaded, checked.platform


def _check_times(options: SlurmOptions) -> None:
    if options.grace_s > MOST_GRACE_S:
        raise UserError(
            f"--grace {options.grace_s} is more than SLURM takes: a job is told of its limit at most {MOST_GRACE_S} s before it."
        )
    if options.time is None:
        return
    limit = slurm.seconds_of(options.time)
    if 0 < limit <= options.grace_s:  # of 0 sbatch makes no limit
        raise UserError(
            f"--time {options.time} leaves nothing of the --grace of {options.grace_s} s in which the run is asked to stop "
            "before its limit. Raise the limit, or lower --grace; it should last for a step and its checkpoint."
        )


def _check_temp(temp: Path) -> None:
    if len(str(temp)) > LONGEST_TEMP or not temp.is_absolute():
        raise UserError(
            f"--temp {temp}: wanted is an absolute path of at most {LONGEST_TEMP} characters on every node's own disk. Ray puts "
            "sockets below it, and the system allows their paths 107."
        )


def _check_paths(recipe: AnyRecipe, path: Path, working_dir: Path) -> None:
    """On a Ray cluster the job's folder is a copy that goes with the job."""
    if not path.absolute().is_relative_to(working_dir.absolute()):
        raise UserError(
            f"The recipe {path} is not in the folder that is sent, {working_dir}, which is the one that megarl was called in."
        )
    for key, value in (("run.dir", recipe.run.dir), ("model.path", recipe.model.path)):
        if not value.is_absolute():
            raise UserError(
                f"{key} is {value}, relative to the folder that is sent with the job and removed with it. Set it to an "
                "absolute path that every node of the cluster sees."
            )


def _refuse_second(run: Path) -> None:
    """Two jobs on one run would write over each other."""
    before = last_submission(run)
    try:
        alive = before is not None and is_alive(before)
    except TokenError as error:
        raise UserError(
            f"Whether the last job of {run} has ended cannot be asked. {error} Where that cluster is another one by now, and "
            f"the job gone with its own, remove {run / FOLDER / FILE}."
        ) from error
    if before is not None and alive:
        raise UserError(
            f"{before.kind} job {before.job} of {run} has not ended. Wait for it, end it by megarl cancel {run}, or choose "
            "another run.name."
        )


@contextmanager
def _alone(run: Path) -> Iterator[None]:
    """Within the block nobody else submits the run. Raises UserError where another does, or has while it was checked here."""
    folder = run / FOLDER
    with ExitStack() as stack:
        with writing(run):
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder))
        _refuse_second(run)
        yield


def _command(recipe: AnyRecipe) -> str:
    return command_of(type(recipe))


def _slurm_job(recipe: AnyRecipe, platform: Platform, options: SlurmOptions, per_node: int, run: Path) -> SlurmJob:
    folder = run / FOLDER
    return SlurmJob(
        name=recipe.run.name,
        recipe=folder / "recipe.yaml",
        command=_command(recipe),
        log=Path(str(folder).replace("%", "%%")) / "slurm-%j.out",  # %j: the job's number
        events=folder / EVENTS,
        metrics=run / METRICS_FILE,
        nodes=options.nodes,
        spares=recipe.cluster.spares,
        gpus_per_node=options.gpus_per_node,
        devices_per_node=per_node,
        resource=platform.ray_resource,
        time=options.time,
        partition=options.partition,
        account=options.account,
        cpus_per_task=options.cpus_per_task,
        memory=options.memory,
        exclude=options.exclude,
        grace_s=options.grace_s,
        start_s=options.start_s,
        temp=options.temp,
        setup=options.setup,
        extra=options.extra,
    )
