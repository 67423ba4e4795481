"""The temporary folder of one run on this machine. Whatever its processes leave there goes with it, however they end.

Libraries leave things in the system's temporary folder as soon as they are imported, and have no time to remove them where
they are killed: the driver and all that it starts get a folder of the run's own for that.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megarl.core import janitor

TMPDIR = "TMPDIR"
REGISTRY = "shared_memory.txt"


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
        folder = Path(tempfile.mkdtemp(prefix="megarl-"))
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
