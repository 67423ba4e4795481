"""The temporary folder of one run on this machine. Whatever its processes leave there goes with it, however they end.

Libraries leave things in the system's temporary folder as soon as they are imported, and have no time to remove them where
they are killed: the driver and all that it starts get a folder of the run's own for that.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megarl.core import janitor

TMPDIR = "TMPDIR"
REGISTRY = "shared_memory.txt"
PREFIX, BOOT = "megarl-", ".boot"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # another each time that the machine starts


def make_folder(parent: Path, name: str | None = None) -> Path:
    """A folder `megarl-...` of a run on this machine, for this user alone, marked for `sweep`. name: a given one."""
    sweep(parent, PREFIX)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)) if name is None else parent / name
    if name is not None:
        folder.mkdir(mode=0o700)
    mark(folder)
    return folder


def mark(folder: Path) -> None:
    """Note since which start of which machine a folder is there."""
    (folder / BOOT).write_text(_boot())


def sweep(parent: Path, prefix: str) -> None:
    """Remove marked folders that begin so, of this machine before it was last started: no janitor outlives a loss of power."""
    now = _boot()
    for path in parent.glob(f"{prefix}*/{BOOT}"):
        with suppress(OSError):  # another user's
            before = path.read_text()
            if before != now and before.partition(" ")[0] == now.partition(" ")[0]:
                shutil.rmtree(path.parent, ignore_errors=True)


def _boot() -> str:
    return f"{socket.gethostname()} {BOOT_ID.read_text().strip()}"


def temporary(folder: Path) -> Path:
    """Where processes put what is temporary, inside of the run's folder on a machine."""
    return folder / "tmp"


@dataclass
class Scratch:
    """Use as a context manager: leaving it removes the folder. run_id: marks every process of the run.

    guard: the janitor, which removes it where this process is killed.
    """

    run_id: str
    folder: Path
    guard: subprocess.Popen[bytes]
    before: str | None  # TMPDIR

    @classmethod
    def open(cls) -> Scratch:
        """Make it, and let this process and those that it starts from now on use it for what is temporary."""
        run_id = secrets.token_hex(8)
        # Ray's sockets live here, and their paths must stay short.
        folder = make_folder(Path(tempfile.gettempdir()))
        scratch = cls(
            run_id, folder, janitor.start(run_id, folder / REGISTRY, folders=[folder]), os.environ.get(TMPDIR)
        )
        temporary(folder).mkdir()
        os.environ[TMPDIR] = str(temporary(folder))
        tempfile.tempdir = None  # Python looks once, and remembers
        return scratch

    @property
    def registry(self) -> Path:
        """File with the names of shared memory that is to be removed when the run ends."""
        return self.folder / REGISTRY

    def close(self) -> None:
        """Remove the folder with everything in it; temporary files go where they went before."""
        if self.before is None:
            os.environ.pop(TMPDIR, None)
        else:
            os.environ[TMPDIR] = self.before
        tempfile.tempdir = None
        shutil.rmtree(self.folder, ignore_errors=True)
        self.guard.kill()
        self.guard.wait()

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
