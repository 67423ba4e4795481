"""Where a process of the run is: its stacks by its own fault handler, or by py-spy where that cannot answer.

A process that is stopped runs no handler, and one that its kernel does not let go (a driver, a file system) does not
either. py-spy reads the memory of another process, which the system may forbid: then it is said why.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
PY_SPY_S = 10.0


def foreign_stack(pid: int) -> str:
    """All stacks of a process on this machine, read from outside; or why there are none."""
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return (
            "(no stack: py-spy, which reads that of a process that cannot answer, is not installed: pip install py-spy)"
        )
    # Without stopping it: a process that is stopped cannot be stopped once more.
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_S, check=False)
    except subprocess.TimeoutExpired:
        return f"(no stack: py-spy did not read it within {PY_SPY_S:g} s)"
    if done.returncode == 0:
        return done.stdout.strip()
    return f"(no stack: py-spy could not read it: {_first_line(done.stderr)}{_permission(done.stderr)})"


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "it did not say why").removesuffix(":")


def _permission(error: str) -> str:
    if "permission" not in error.lower() and "not permitted" not in error.lower():
        return ""
    scope = PTRACE_SCOPE.read_text().strip() if PTRACE_SCOPE.exists() else "0"
    if scope != "0":
        return (
            f". This machine lets no process read another (kernel.yama.ptrace_scope is {scope}): root can set it to 0"
        )
    return ". A container needs the capability SYS_PTRACE for it (docker run --cap-add SYS_PTRACE)"
