"""SLURM's own commands, asked and understood: partitions, submission, state, cancellation. Not what is submitted."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.core.errors import MegarlError, UserError
from megarl.core.words import did_you_mean

COMMAND_S = 60.0
ONLY_THERE = "call megarl on a login node of the SLURM cluster."
TIME_FORMS = (
    "MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, DAYS-HOURS:MINUTES or DAYS-HOURS:MINUTES:SECONDS"
)
TIME = re.compile(r"(\d+-\d+(:[0-5]?\d){0,2}|\d+(:[0-5]?\d){0,2})")
# As SLURM names them: the job has ended for good. It shows flags in their place (SIGNALING, STOPPED, SPECIAL_EXIT and more, and
# others with other versions): with any of these the job is still to come, or under way.
ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "LAUNCH_FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "RECONFIG_FAIL",
    "REVOKED",
    "TIMEOUT",
)
# Of SLURM's variables those that a user or a cluster sets. All others are of the job that this process is in, where there is one.
NO_JOBS = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")
# sbatch reads options from variables, SBATCH_PARTITION for --partition, which win over those of a script. Under other names:
VARIABLES = {
    "time": ("TIMELIMIT",),
    "requeue": ("REQUEUE", "NO_REQUEUE"),
    "output": ("OUTPUT", "ERROR"),
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU")),
}
# Options that sbatch has variables for, by their letters: those that a script of ours may have from --sbatch.
LETTERS = {
    "A": "account",
    "C": "constraint",
    "G": "gpus",
    "J": "job-name",
    "M": "clusters",
    "O": "overcommit",
    "S": "core-spec",
    "i": "input",
    "m": "distribution",
    "p": "partition",
    "q": "qos",
}
# One of an array is the same run again, and sbatch is not to wait for the end of the job.
NEVER = ("SBATCH_ARRAY_INX", "SBATCH_WAIT")


@dataclass(frozen=True)
class JobState:
    """What SLURM says of a job. exit_code: of its script, once it has ended; 128 and more: ended by a signal."""

    name: str
    reason: str
    nodes: str
    restarts: int
    exit_code: int

    @property
    def alive(self) -> bool:
        """Whether it has still to end."""
        return self.name not in ENDED

    def describe(self) -> str:
        """For people."""
        reason = f" ({self.reason})" if self.reason not in ("None", "") else ""
        nodes = f" on {self.nodes}" if self.nodes not in ("(null)", "") else ""
        restarts = f", queued again {self.restarts} times" if self.restarts else ""
        return f"{self.name}{reason}{nodes}{restarts}"


def require() -> None:
    """Raises UserError where SLURM's commands are not installed."""
    if shutil.which("sbatch") is None:
        raise UserError(
            "There is no sbatch on this machine: jobs are submitted on a login node of a SLURM cluster. To see the script "
            "that would be submitted, add --dry-run; to run on this machine, use megarl train."
        )


def check_time(text: str) -> None:
    """Raises UserError for what SLURM does not take as a time limit."""
    if not TIME.fullmatch(text):
        raise UserError(f"--time {text} is not a time limit. SLURM takes {TIME_FORMS}, such as 4:00:00 for four hours.")


def seconds_of(text: str) -> int:
    """A time limit in seconds: `90` is minutes, `1-12` a day and a half."""
    check_time(text)
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def check_partition(names: str) -> None:
    """Raises UserError for a partition that sinfo does not list. names: one, or several with commas, as sbatch takes them."""
    there = list(dict.fromkeys(_ask(["sinfo", "--all", "--noheader", "--format=%R"]).split()))
    for name in names.split(","):
        if name not in there:
            hint = did_you_mean(name, there)
            raise UserError(f"--partition {name}: SLURM has no such partition.{hint} It has: {', '.join(there)}.")


def submit(script: Path) -> tuple[str, str]:
    """Submit a script; returns the job's id, and the cluster that it went to where sbatch was asked for one (SBATCH_CLUSTERS).

    Raises UserError with SLURM's own words where it refuses.
    """
    try:
        done = _run(["sbatch", "--parsable", str(script)], _environment(script))
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(
            "sbatch was under way: the job may be queued all the same, and megarl does not know its number. See squeue --me; "
            "scancel ends it."
        )
        raise
    if done.returncode:
        raise UserError(f"SLURM refuses the job: {done.stderr.strip()}. The script is {script}.")
    job, _, cluster = done.stdout.strip().partition(";")
    return job, cluster


def _environment(script: Path) -> dict[str, str]:
    """For sbatch: what the script says of the job holds, and what is said of another job does not."""
    lines = [line for line in script.read_text(errors="replace").splitlines() if line.startswith("#SBATCH")]
    said = {name for line in lines for name in re.findall(r"\s--([a-z-]+)", line)}
    said |= {LETTERS[letter] for line in lines for letter in re.findall(r"\s-([A-Za-z])", line) if letter in LETTERS}
    without = {*NEVER}
    for name in said:
        without |= {f"SBATCH_{each}" for each in VARIABLES.get(name, (name.replace("-", "_").upper(),))}
    if "SLURM_JOB_ID" in os.environ:  # as on a node that was taken for interactive work
        without |= {name for name in os.environ if name.startswith("SLURM_") and name not in NO_JOBS}
    return {name: value for name, value in os.environ.items() if name not in without}


def state_of(job: str, cluster: str = "") -> JobState | None:
    """What SLURM knows of a job; None where it has forgotten it. cluster: that it went to; default: the one that is here."""
    done = _run(["scontrol", *_of(cluster), "show", "job", job, "--oneliner"])
    if done.returncode and "Invalid job id" in done.stderr:
        return None
    if done.returncode:
        raise MegarlError(f"SLURM does not answer: {done.stderr.strip()}")
    fields: dict[str, str] = dict(word.partition("=")[::2] for word in done.stdout.split() if "=" in word)
    if "JobState" not in fields:
        raise MegarlError(f"SLURM says no state of job {job}: {done.stdout.strip()[:200]!r}")
    code, _, number = fields.get("ExitCode", "0:0").partition(":")
    return JobState(
        fields["JobState"],
        fields.get("Reason", ""),
        fields.get("NodeList", ""),
        int(fields.get("Restarts", "0")),
        int(code) or (128 + int(number) if int(number) else 0),
    )


def cancel(job: str, cluster: str = "") -> None:
    """End a job, whatever it is doing. cluster: as for state_of."""
    _ask(["scancel", *_of(cluster), job])


def _of(cluster: str) -> list[str]:
    """The option by which SLURM's commands speak of another cluster than the one that is here."""
    return [f"--clusters={cluster}"] if cluster else []


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=COMMAND_S, check=False
        )
    except FileNotFoundError as error:
        raise UserError(f"There is no {command[0]} on this machine: {ONLY_THERE}") from error
    except subprocess.TimeoutExpired as error:
        raise MegarlError(
            f"SLURM does not answer: `{shlex.join(command)}` had not ended after {COMMAND_S:g} s. It may have taken effect all "
            "the same: see squeue, and try again."
        ) from error


def _ask(command: Sequence[str]) -> str:
    done = _run(command)
    if done.returncode:
        raise UserError(f"SLURM does not answer here: {done.stderr.strip()} (`{shlex.join(command)}`): {ONLY_THERE}")
    return done.stdout
