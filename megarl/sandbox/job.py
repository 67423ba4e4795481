"""What a sandbox is asked to run, within which bounds, and what it says. Plain records, without any process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from megarl.core.errors import UserError

MIB = 2**20
MOST_VALUE = 65536  # characters of a check's value; runner.py, which imports nothing of megarl, has the same
BESIDE = 77  # exit code of a check that cannot be run apart from the code; stand_ins.py has the same
LEAST_MEMORY_BYTES = 48 * MIB  # Python itself, and bubblewrap around it
# The script's own name, where its files are, and its standard input. They may not be given as files.
SCRIPT, STDIN = "main.py", ".stdin"

# ok: exit code 0. error: another exit code, or a signal. The others: the bound that it ran into, which ended it.
Ending = Literal["ok", "error", "timeout", "cpu", "memory", "output"]


@dataclass(frozen=True)
class Limits:
    """Bounds of one sandbox, over all of its processes together where nothing else is said.

    timeout_s: wall-clock. cpu_s: CPU seconds. memory_bytes: with what it writes into its folder. disk_bytes: that folder.
    file_bytes: one file. processes: threads counted. open_files: of one process. output_bytes: of standard output, and as
    many of standard error. input_bytes: code, files and standard input.
    """

    timeout_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 512 * MIB
    disk_bytes: int = 64 * MIB
    file_bytes: int = 32 * MIB
    processes: int = 32
    open_files: int = 64
    output_bytes: int = MIB // 4
    input_bytes: int = 32 * MIB

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) > 0:
                raise UserError(f"a sandbox's {each.name} is {getattr(self, each.name)!r}; it has to be above 0")
        if self.memory_bytes < LEAST_MEMORY_BYTES:
            raise UserError(
                f"a sandbox's memory_bytes is {self.memory_bytes}; an interpreter alone needs {LEAST_MEMORY_BYTES}"
            )
        if self.open_files < 16:
            raise UserError(f"a sandbox's open_files is {self.open_files}; an interpreter needs 16")


@dataclass(frozen=True)
class Check:
    """One line that is run after the code, in its names. value: an expression, whose value comes back as text, so that
    somebody outside compares it. assert: statements, which pass where they raise nothing. apart: such statements, in a
    sandbox of their own, where `names` stand for those of the code: what is wanted, the code never sees.
    """

    kind: Literal["value", "assert", "apart"]
    source: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checked:
    """What a check came to. ok: it ran without raising. text: the value as a Python literal, or what went wrong.

    But for `apart` it comes from the process that the code ran in: code that sets out to can say so of an `assert` that did
    not pass. A value it would have to know.
    """

    ok: bool
    text: str


@dataclass(frozen=True)
class Job:
    """One program. files: by path below its folder, which it is started in. checks: run after it, where there are any.

    asks: names that stand for those of the program in another sandbox.
    """

    code: str
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    timeout_s: float = Limits.timeout_s
    checks: tuple[Check, ...] = ()
    asks: tuple[str, ...] = ()

    def num_bytes(self) -> int:
        """What is sent into the sandbox."""
        files = sum(len(name) + len(data) for name, data in self.files.items())
        return len(self.code) + len(self.stdin) + files + sum(len(check.source) for check in self.checks)


@dataclass(frozen=True)
class Result:
    """How a program ended. stdout, stderr: as text; what was cut ends with a line that says so.

    exit_code: None where a bound or a signal ended it. signal: its name, such as SIGSEGV; a program that exits with 128
    and more reads the same. reason: which bound, in words; empty for ok and error. checked: one for each check that was
    reached, in their order.
    """

    ended: Ending
    stdout: str
    stderr: str
    exit_code: int | None
    signal: str | None
    seconds: float
    reason: str = ""
    stdout_cut: bool = False
    stderr_cut: bool = False
    checked: tuple[Checked, ...] = ()


@dataclass(frozen=True)
class InForce:
    """How the bounds are held on this machine, as found when the pool started.

    memory: `cgroup v1`, `cgroup v2`, or `watched`: rlimits, and the sum over all processes looked at many times a second.
    user: the host's user id that the sandboxes run as. bubblewrap: its version.
    """

    memory: str
    user: int
    bubblewrap: str


def check_job(job: Job, limits: Limits) -> None:
    """Raises UserError: more than goes in, or names that leave the folder."""
    if job.num_bytes() > limits.input_bytes:
        raise UserError(
            f"{job.num_bytes()} bytes of code, files and standard input are more than a sandbox takes ({limits.input_bytes})"
        )
    in_folder = len(job.code) + len(job.stdin) + sum(map(len, job.files.values()))
    if in_folder > limits.disk_bytes:
        raise UserError(
            f"{in_folder} bytes of code, files and standard input do not go into a sandbox's folder of {limits.disk_bytes} bytes "
            "(disk_bytes; in a recipe disk_mb)"
        )
    if not job.timeout_s > 0:
        raise UserError(f"timeout_s is {job.timeout_s!r}; it has to be above 0")
    for name in job.files:
        parts = name.split("/")
        if not name or name in (SCRIPT, STDIN) or "\0" in name or {"", ".", ".."} & set(parts):
            raise UserError(
                f"{name!r} is no name for a file of a sandbox: a path below its folder is, such as data/words.txt, and not "
                f"{SCRIPT} or {STDIN}"
            )
