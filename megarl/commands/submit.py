"""The part of the command line that hands runs to clusters: submit, status, logs, cancel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from megarl.commands.options import Overrides, RecipePath
from megarl.core.errors import MegarlError, UserError
from megarl.core.interrupts import Interrupts, as_error
from megarl.launch.script import TEMPLATE

app = typer.Typer()

SLURM, RAY = "SLURM", "Ray"


def _slurm(help_: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help_, rich_help_panel=SLURM, **settings)


RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a submitted run.", show_default=False)]
ToSlurm = Annotated[bool, _slurm("From a login node of a SLURM cluster.", "--slurm")]
Nodes = Annotated[int, _slurm("How many.", min=1)]
GpusPerNode = Annotated[int | None, _slurm("Default: a run on CPUs.", min=1)]
Time = Annotated[str | None, _slurm("Limit, as sbatch takes it: 4:00:00; 0: none.")]
Partition = Annotated[str | None, _slurm("One of sinfo's, or several with commas between.")]
Account = Annotated[str | None, _slurm("To be charged.")]
CpusPerTask = Annotated[int | None, _slurm("CPUs of each node.", min=1)]
Memory = Annotated[str | None, _slurm("Of each node, as sbatch --mem takes it.")]
Exclude = Annotated[str | None, _slurm("Nodes not to run on.")]
Grace = Annotated[int, _slurm("Seconds before the limit at which the run is asked to commit and stop.", min=1)]
StartDeadline = Annotated[int, _slurm("Seconds until every node has to be there.", min=1)]
Temp = Annotated[Path, _slurm("Folder on every node's own disk; its path has to be short.")]
Setup = Annotated[str | None, _slurm("Shell line that the job runs first, such as 'module load cuda'.")]
Template = Annotated[Path, _slurm("Job script to fill in.", show_default="launch/slurm.sbatch")]
Sbatch = Annotated[list[str] | None, _slurm("One more #SBATCH option, as it is: --sbatch=--qos=high. Repeatable.")]
ToRay = Annotated[
    str | None,
    typer.Option(
        metavar="http://HEAD:8265",
        help="Dashboard of the cluster; the working directory is packed and sent.",
        rich_help_panel=RAY,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that was begun before.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Show the log; end with the job, and with its exit code.")]


@app.command()
def submit(
    ctx: typer.Context,
    recipe: RecipePath,
    overrides: Overrides = None,
    slurm: ToSlurm = False,
    nodes: Nodes = 1,
    gpus_per_node: GpusPerNode = None,
    time: Time = None,
    partition: Partition = None,
    account: Account = None,
    cpus_per_task: CpusPerTask = None,
    memory: Memory = None,
    exclude: Exclude = None,
    grace: Grace = 300,
    start_deadline: StartDeadline = 600,
    temp: Temp = Path("/tmp"),
    setup: Setup = None,
    template: Template = TEMPLATE,
    sbatch: Sbatch = None,
    ray: ToRay = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    follow: Follow = False,
) -> None:
    """Hand a run to SLURM or to a Ray cluster.

    The whole recipe is checked first, here, and refused with exit code 2 before anything is submitted. A SLURM job starts
    Ray over its nodes with a secret and ports of its own; it is queued again, and goes on from the last checkpoint, where a
    node is lost or the time limit comes near.

    Example: megarl submit recipes/quickstart.yaml --slurm --nodes 2 --time 4:00:00 --follow
    """
    from megarl.launch.submit import SlurmOptions, submit_ray, submit_slurm
    from megarl.run.ending import called_with

    if slurm == (ray is not None):
        raise UserError("Say where to: either --slurm or --ray http://HEAD:8265. To run on this machine: megarl train.")
    words, say = overrides or [], typer.echo
    if ray is not None:
        _refuse_slurms_options(ctx)
        folder = submit_ray(recipe, words, ray, Path.cwd(), resume=resume, dry_run=dry_run, say=say)
    else:
        asked = (nodes, gpus_per_node, time, partition, account, cpus_per_task, memory, exclude, grace, start_deadline)
        options = SlurmOptions(*asked, temp, setup, template, tuple(sbatch or ()))
        again = called_with(but=("--resume", "--follow"))
        folder = submit_slurm(recipe, words, options, resume=resume, dry_run=dry_run, say=say, again=again)
    if not dry_run:
        typer.echo(f"megarl status, logs -f and cancel: with {folder}")
        if follow:
            _follow(folder)


def _refuse_slurms_options(ctx: typer.Context) -> None:
    """Raise UserError for what a Ray cluster would not hear of: what a run uses there is what its recipe says."""
    slurms = [each for each in ctx.command.params if getattr(each, "rich_help_panel", None) == SLURM]
    given = [each.opts[0] for each in slurms if str(ctx.get_parameter_source(str(each.name))).endswith("COMMANDLINE")]
    if given:
        raise UserError(
            f"{', '.join(given)}: read with --slurm alone. A Ray job gets the devices that the recipe asks for (cluster.devices, "
            "rollout.servers); leave the options out."
        )


@app.command()
def status(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="Folder of a submitted run; default: all in runs/.")
    ] = None,
) -> None:
    """Say what submitted runs are doing: the scheduler's word, and the steps done."""
    from megarl.launch.record import submitted_runs
    from megarl.launch.watch import status as state_of

    runs = [run] if run is not None else submitted_runs(Path("runs"))
    if not runs:
        raise UserError("No run in runs/ was submitted from here. Name a run's folder: megarl status RUN.")
    # Folders are whole: they are what the other commands take.
    table = Table(*(Column(name, overflow="fold") for name in ("run", "job", "state", "steps")))
    failed = 0
    for each in runs:
        try:
            table.add_row(str(each), *state_of(each))
        except MegarlError as error:
            if run is not None:
                raise
            # One scheduler that does not answer hides no run of another.
            table.add_row(str(each), "", str(error), "")
            failed = error.exit_code
    Console(markup=False).print(table)
    raise typer.Exit(failed)


@app.command()
def logs(
    run: RunFolder,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the job ends; exit code: the job's.")] = False,
) -> None:
    """Show what a submitted run has printed."""
    from megarl.launch.watch import show_logs

    if follow:
        _follow(run)
    show_logs(run, follow=False, write=sys.stdout.write)


@app.command()
def cancel(run: RunFolder) -> None:
    """End a submitted run."""
    from megarl.launch.watch import cancel as end

    typer.echo(end(run))


def _follow(run: Path) -> None:
    from megarl.launch.watch import exit_code, show_logs

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    with Interrupts(quiet=True):  # "ending everything" would be said of the job
        try:
            show_logs(run, follow=True, write=write)
        except KeyboardInterrupt as error:
            error.add_note(f"The job goes on; end it by megarl cancel {run}")
            raise as_error(error) from None
    raise typer.Exit(exit_code(run))
