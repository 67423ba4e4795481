"""Tries all escapes: `python -m tests.sandbox.attempts`, in sandboxes, and prints what came of it as JSON.

A program of its own, so that another user can run it. With `--bare` nothing holds the escapes but namespaces that keep this
machine whole: there they have to succeed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from megarl.sandbox.job import MIB, Limits
from megarl.sandbox.pool import SandboxPool
from megarl.sandbox.seccomp import MACHINES, REFUSED
from tests.sandbox.escapes import ESCAPES, PRELUDE, Escape

LIMITS = Limits(
    timeout_s=30,
    cpu_s=2,
    memory_bytes=96 * MIB,
    disk_bytes=16 * MIB,
    file_bytes=8 * MIB,
    processes=16,
    open_files=64,
    output_bytes=65536,
)
BARE_S = 60


class Outside:
    """What there is to be reached: secrets, listeners, a process. reached: who connected."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.secret = secrets.token_hex(8)
        self.mark = f"mark-{secrets.token_hex(8)}"
        file = folder / "recipe.yaml"
        file.write_text(f"key: {self.secret}")
        os.environ["MEGARL_TEST_KEY"] = self.secret
        stack.callback(os.environ.pop, "MEGARL_TEST_KEY")
        self.victim = stack.enter_context(subprocess.Popen(["sleep", "600"]))
        stack.callback(self.victim.kill)
        self._open = stack.enter_context(file.open())
        os.set_inheritable(self._open.fileno(), True)
        unix, abstract = str(folder / "socket"), f"megarl-{self.mark}"
        self.listeners = {
            "PORT": _listener(stack, socket.AF_INET, ("127.0.0.1", 0)),
            "PORT6": _listener(stack, socket.AF_INET6, ("::1", 0)),
            "UNIX": _listener(stack, socket.AF_UNIX, unix),
            "ABSTRACT": _listener(stack, socket.AF_UNIX, "\0" + abstract),
        }
        machine = MACHINES[platform.machine()]
        numbers = {name: each[machine.column] for name, each in REFUSED.items() if each[machine.column] is not None}
        self.words = {
            "SECRET": self.secret,
            "SECRET_FILE": str(file),
            "MARK": self.mark,
            "VICTIM": str(self.victim.pid),
            "HOST": os.uname().nodename,
            "UNIX": unix,
            "ABSTRACT": abstract,
            "PORT": str(self.listeners["PORT"].getsockname()[1]),
            "PORT6": str(self.listeners["PORT6"].getsockname()[1]),
            "CLONE": str(machine.clone),
            "NUMBERS": repr(numbers),
        }

    def program(self, escape: Escape, *, files: int) -> str:
        """The escape with what it aims at. files: how many it makes that tries to fill a disk with empty ones."""
        code = PRELUDE + escape.code
        for name, value in (self.words | {"FILES": str(files)}).items():
            code = code.replace(f"@{name}@", value)
        return code

    def reached(self) -> list[str]:
        """Listeners that somebody connected to."""
        found = []
        for name, listener in self.listeners.items():
            try:
                listener.accept()[0].close()
            except BlockingIOError:
                continue
            found.append(name)
        return found

    def marked(self) -> list[int]:
        """Processes of the machine that carry the mark on their command line."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # it ended meanwhile
        return found


def _listener(stack: ExitStack, family: int, address: Any) -> socket.socket:
    listener = stack.enter_context(socket.socket(family))
    listener.bind(address)
    listener.listen()
    listener.setblocking(False)
    return listener


@contextmanager
def outside() -> Iterator[Outside]:
    with ExitStack() as stack:
        yield Outside(Path(stack.enter_context(tempfile.TemporaryDirectory())), stack)


async def within() -> dict[str, Any]:
    """All escapes, each in a sandbox; and how things stand outside after them."""
    with outside() as around:
        async with SandboxPool(LIMITS, size=6) as pool:

            async def attempt(escape: Escape) -> dict[str, Any]:
                result = await pool.run(around.program(escape, files=1_000_000), stdin="", timeout_s=escape.timeout_s)
                return {
                    "ended": result.ended,
                    "stdout": result.stdout[:2000],
                    "stderr": result.stderr[-2000:],
                    "kept": len(result.stdout) + len(result.stderr),
                    "seconds": result.seconds,
                }

            found = await asyncio.gather(*(attempt(escape) for escape in ESCAPES))
            again = await pool.run("print('still works')")
            return {
                "in_force": pool.in_force.memory,
                "user": pool.in_force.user,
                "found": {escape.name: each for escape, each in zip(ESCAPES, found, strict=True)},
                "reached": around.reached(),
                "victim_lives": around.victim.poll() is None,
                "marked": around.marked(),
                "after": again.stdout,
            }


def bare() -> dict[str, Any]:
    """All escapes that can, each beside another process in namespaces of its own, and nothing else held back."""
    able = [escape for escape in ESCAPES if not escape.not_bare]
    with outside() as around, ThreadPoolExecutor(4) as several:
        found = several.map(lambda escape: _bare(around.program(escape, files=100)), able)
        return {"found": {escape.name: each for escape, each in zip(able, found, strict=True)}}


def _bare(program: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        shell = 'sleep 600 & exec "$0" -c "$1"'
        command = ["unshare", *(["--user", "--map-root-user"] if os.getuid() else [])]
        command += ["--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc"]
        command += ["setsid", "--wait", "bash", "-c", shell, sys.executable, program]
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BARE_S,
            close_fds=False,
            check=False,
        )
    return {"stdout": done.stdout[:2000], "stderr": done.stderr[-2000:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bare", action="store_true")
    options = parser.parse_args()
    print(json.dumps(bare() if options.bare else asyncio.run(within())))


if __name__ == "__main__":
    main()
