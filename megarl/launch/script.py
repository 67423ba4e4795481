"""The script of a SLURM job: launch/slurm.sbatch with a job's figures filled in. Submitting it is slurm.py's."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megarl.core.errors import UserError
from megarl.core.shipped import shipped

TEMPLATE = shipped("launch") / "slurm.sbatch"


# Options of sbatch that say which part of a node a job gets; some of them SLURM refuses beside those of a whole one.
PARTS = ("--exclusive", "--oversubscribe", "--share", "-s", "--cpus-per-task", "-c", "--cpus-per-gpu", "--mem")


# Options of sbatch that decide what the job is made for, and why they cannot be given beside.
_NODES = "the recipe is checked against --nodes, and each node has one task"
_AGAIN = "the run is stopped before the time limit and goes on in the same job; how long before is --grace"
OWNED = {
    **dict.fromkeys(("--array", "-a"), "every job of an array would be the same run, in the same folder"),
    **dict.fromkeys(("--output", "-o", "--error", "-e"), "megarl logs reads the log that the script names"),
    **dict.fromkeys(("--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node"), _NODES),
    **dict.fromkeys(("--signal", "--no-requeue"), _AGAIN),
    **dict.fromkeys(("--time", "-t"), "give it as --time"),
    **dict.fromkeys(("--gpus-per-node",), "give it as --gpus-per-node"),
}
# An option of sbatch's that is no shorter form of one of these, though another begins with it.
WHOLE = ("--gpus",)


@dataclass(frozen=True)
class SlurmJob:
    """What a job asks of SLURM, and what it runs.

    nodes: spares included. devices_per_node: of `resource`, where these are not GPUs, which Ray finds by itself. grace_s: how
    long before the time limit the run is asked to stop. temp: on every node's own disk. setup: shell line that runs first on
    the job's first node. extra: lines of #SBATCH options, as they are.
    """

    name: str
    recipe: Path
    command: str  # train or sft
    log: Path
    events: Path
    metrics: Path
    nodes: int
    gpus_per_node: int | None
    devices_per_node: int
    resource: str
    spares: int = 0
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
    extra: Sequence[str] = field(default=())

    @property
    def takes_whole_nodes(self) -> bool:
        """Whether a job on GPUs gets all CPUs and all memory of its nodes, as nothing was said of either."""
        said = self.cpus_per_task or self.memory or any(map(_is_part, self.extra))
        return bool(self.gpus_per_node) and not said

    @property
    def python(self) -> str:
        """The interpreter of whoever submits: the nodes see the same file system."""
        return sys.executable


def _is_part(option: str) -> bool:
    """Whether a line of sbatch's options has one of PARTS: `-c8`, `--mem=0`, `--mem-per-gpu=80G`."""
    return any(name in PARTS or name.startswith("--mem-per-") for name in _names(option))


def _owned(option: str) -> str | None:
    """Which of OWNED a line of sbatch's options has, also where it is cut short, as sbatch takes it; None where it has none."""
    for name in _names(option):
        short = name.startswith("--") and name not in (*OWNED, *WHOLE)
        found = (owned for owned in OWNED if (owned.startswith(name) if short else owned == name))
        if owned := next(found, None):
            return owned
    return None


def _names(option: str) -> list[str]:
    """sbatch takes several options from one line."""
    try:
        words = shlex.split(option)
    except ValueError:  # a quote that does not end
        words = option.split()
    return [word.partition("=")[0] if word.startswith("--") else word[:2] for word in words if word.startswith("-")]


def _quoted(path: Path | str) -> str:
    """A path as sbatch reads it in a script's option: within quotes, `\\` takes what stands behind it as it is."""
    escaped = re.sub(r'(["\\])', r"\\\1", str(path))
    return f'"{escaped}"'


def _word(value: object) -> str:
    """A value of an option as sbatch reads it: quoted where it would not be one word otherwise."""
    text = str(value)
    return text if re.fullmatch(r"[\w%+=:,./@\[\]-]+", text) else _quoted(text)


def render(job: SlurmJob, template: Path = TEMPLATE) -> str:
    """The script. Raises UserError for a template that is missing or that asks for what is not there, and for OWNED options."""
    if odd := [each for each in job.extra if not each.startswith("-")]:
        raise UserError(f"--sbatch {odd[0]} is no option of sbatch. Write it as it is, with `=`: --sbatch=--qos=high.")
    for each in job.extra:
        if owned := _owned(each):
            raise UserError(f"--sbatch {each} cannot be: {OWNED[owned]}.")
    if not template.is_file():
        raise UserError(
            f"There is no job script at {template}. megarl brings one as launch/slurm.sbatch; see --template."
        )
    from jinja2 import Environment, StrictUndefined, TemplateError

    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    environment.filters["sbatch"] = _quoted
    environment.filters["word"] = _word
    try:
        return environment.from_string(template.read_text()).render(job=job)
    except TemplateError as error:
        raise UserError(f"The job script {template} cannot be filled in: {error}.") from error
