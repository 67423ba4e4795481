"""What the exit code of a command means: the one table. docs/exit_codes.md is made of it.

python -m megarl.core.exit_codes > docs/exit_codes.md
"""

from __future__ import annotations

from dataclasses import dataclass

DONE, FAULT, REFUSED = 0, 1, 2
STOPPED = 75  # what sysexits.h calls a temporary failure: try again later
HUNG_UP, INTERRUPTED, TERMINATED, KILLED = 129, 130, 143, 137  # 128 + the number of the signal, as shells say it


@dataclass(frozen=True)
class ExitCode:
    """One row. slurm: what the leader of a SLURM job does where its driver ends so."""

    code: int
    name: str
    meaning: str
    follows: str
    slurm: str


EXIT_CODES = (
    ExitCode(DONE, "done", "Everything that was asked for is there.", "nothing", "the job ends"),
    ExitCode(
        FAULT,
        "fault",
        "Something failed while it ran: a process died, a deadline passed, a node was lost, a disk was full, or megarl has a "
        "bug (then with a stack trace). `megarl convert inspect` found damage; `megarl doctor` found what megarl cannot run "
        "without.",
        "a run: the message names the last good checkpoint and the command that goes on from it",
        "the job ends; where a node was lost, it is queued again",
    ),
    ExitCode(
        REFUSED,
        "refused",
        "The command line, the recipe, or what they name cannot be used. Only before a run: no rank and no server had been "
        "started, and nothing was trained.",
        "mend what the paragraph names, and give the command again",
        "the job ends",
    ),
    ExitCode(
        STOPPED,
        "stopped",
        "The run was asked to stop early (SIGUSR1 to the driver, as a scheduler or `timeout -s USR1` sends it "
        "before a time limit). It has finished its step and committed a checkpoint of it.",
        "the message has the command that goes on",
        "the job is queued again, and goes on by itself",
    ),
    ExitCode(
        HUNG_UP,
        "hung up",
        "SIGHUP, as of a terminal that was closed or an ssh connection that was lost, otherwise as Ctrl-C. A command that was "
        "started by nohup, or in tmux, outlives its terminal.",
        "as for Ctrl-C; a run's `logs/driver.log` has the message",
        "the job ends",
    ),
    ExitCode(
        INTERRUPTED,
        "interrupted",
        "Ctrl-C (SIGINT). Every process of the run was ended in order; a second Ctrl-C ends the driver at once, and the "
        "janitor does the rest. The step under way is lost.",
        "the message names the last good checkpoint and the command that goes on from it",
        "the job ends",
    ),
    ExitCode(
        TERMINATED,
        "terminated",
        "SIGTERM, otherwise as Ctrl-C.",
        "as for Ctrl-C",
        "the job ends (`megarl cancel`, `scancel`)",
    ),
    ExitCode(
        KILLED,
        "killed",
        "SIGKILL to the driver itself, by the kernel's out-of-memory killer for instance: nothing could be said. The janitor "
        "has ended every process of the run.",
        "the same command with `--resume`, or `--continue` where no checkpoint was committed",
        "the job ends",
    ),
)

HEAD = """# Exit codes

What every command of megarl ends with, for scripts and schedulers. The table is `megarl/core/exit_codes.py`; this page is made
of it (`python -m megarl.core.exit_codes > docs/exit_codes.md`), and tests hold both.

| code | is | means | what follows | in a SLURM job |
|---|---|---|---|---|
"""
TAIL = """
`megarl logs -f` and `megarl submit --follow` end with the job's own exit code. Programs that see a driver end by a signal see
that signal's number; shells add 128 to it.

A run that ends early prints, last of all, the newest checkpoint that is whole and the command that goes on from it, such as
`megarl train recipe.yaml run.seed=2 --resume`; where none was committed yet, the command that begins anew (`--continue`). A
checkpoint that was half-written then is removed.
"""


def render() -> str:
    """The page."""
    rows = [
        f"| {row.code} | {row.name} | {row.meaning} | {row.follows} | {row.slurm} |\n"
        for row in sorted(EXIT_CODES, key=lambda row: row.code)
    ]
    return HEAD + "".join(rows) + TAIL


if __name__ == "__main__":
    print(render(), end="")
