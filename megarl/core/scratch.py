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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megarl.core import janitor
from megarl.core.errors import UserError
from megarl.core.process_state import started_at

TMPDIR = "TMPDIR"
REGISTRY = "shared_memory.txt"
PREFIX, BOOT = "megarl-", ".boot"
PIDS = "/proc/self/ns/pid"  # numbers of processes are another container's where this is another
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # another each time that the machine starts


def make_folder(parent: Path, name: str | None = None) -> Path:
    """A folder `megarl-...` of a run on this machine, for this user alone, marked for `sweep`. name: a given one."""
    sweep(parent, PREFIX)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)) if name is None else parent / name
    if name is not None:
        folder.mkdir(mode=0o700)
    with _removed_on_failure(folder):
        mark(folder)
    return folder


@contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    """What was begun on a full disk, or is interrupted, has no janitor yet, and nobody would sweep it without its mark."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def mark(folder: Path) -> None:
    """Note since which start of which machine a folder is there, and whose it is: this process's."""
    (folder / BOOT).write_text(f"{_boot()}\n{_process(os.getpid())}")


def sweep(parent: Path, prefix: str) -> None:
    """Remove marked folders that begin so and are in use no more, with the shared memory that they have a registry of.

    Of this machine before it was last started, because no janitor outlives a loss of power; and of this user's processes that
    have ended: whoever ends all of a job at once, as schedulers do, ends the janitor as well.
    """
    now = _boot()
    for path in parent.glob(f"{prefix}*/{BOOT}"):
        with suppress(OSError):  # another user's
            before, _, whose = path.read_text().partition("\n")
            if before.partition(" ")[0] != now.partition(" ")[0]:
                continue
            if before != now:
                shutil.rmtree(path.parent, ignore_errors=True)
            elif path.stat().st_uid == os.getuid() and _has_ended(whose):
                janitor.remove(path.with_name(REGISTRY), [path.parent])


def _boot() -> str:
    return f"{socket.gethostname()} {BOOT_ID.read_text().strip()}"


def _process(pid: int) -> str:
    """Names a process, among those that this one sees."""
    return f"{os.readlink(PIDS)} {pid} {started_at(pid)}"


def _has_ended(whose: str) -> bool:
    """Whether it is known that this process is there no more: a container does not see those outside of it."""
    seen, _, process = whose.partition(" ")
    return seen == os.readlink(PIDS) and _process(int(process.partition(" ")[0])) != whose


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
        """Make it, and let this process and those that it starts from now on use it for what is temporary.

        Raises UserError where the system refuses it.
        """
        run_id = secrets.token_hex(8)
        try:
            # Ray's sockets live here, and their paths must stay short.
            folder = make_folder(Path(tempfile.gettempdir()))
            with _removed_on_failure(folder):
                temporary(folder).mkdir()
                guard = janitor.start(run_id, folder / REGISTRY, folders=[folder])
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise UserError(
                f"No temporary folder can be made: {error.strerror or error}{where}. Make room there, or set TMPDIR to another "
                "folder, which can be written to."
            ) from error
        scratch = cls(run_id, folder, guard, os.environ.get(TMPDIR))
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
