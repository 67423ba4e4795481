"""The command that makes one sandbox: bubblewrap's arguments, and which files of the machine are seen inside.

Seen are the interpreter with its standard library, below /python, and the system's shared libraries: no packages, no /etc, no
/proc, no /home. Everything is read-only but one folder in memory.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from megarl.core.errors import UserError
from megarl.sandbox.job import STDIN, Limits

COMMAND = "bwrap"
LEAST_VERSION = (0, 8)  # has --size and --disable-userns
LEAST_KERNEL = (5, 14)  # counts processes of a user by user namespace
ASK_S = 10.0
INSIDE_USER = 65534
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
ZONES = "/usr/share/zoneinfo"
DEVICES = ("null", "zero", "full", "random", "urandom")
PACKAGES = ("site-packages", "dist-packages")
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": "/python/bin",
    "LD_LIBRARY_PATH": "/python/lib",
    "MALLOC_ARENA_MAX": "2",  # each thread's own would count as address space
    "PYTHONDONTWRITEBYTECODE": "1",
}


@dataclass(frozen=True)
class Interpreter:
    """Python as it is on the machine: its file, the folder that its library is in, and the library's name there."""

    file: Path
    prefix: Path
    library: str  # such as lib/python3.11

    @classmethod
    def own(cls) -> Interpreter:
        """The one that this process runs on, without what a virtual environment adds."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        named = Path(sys.base_prefix) / "bin" / version
        file = named if named.exists() else Path(os.path.realpath(sys.executable))
        return cls(Path(os.path.realpath(file)), Path(sys.base_prefix), f"{sys.platlibdir}/{version}")

    def sources(self) -> list[Path]:
        """What is seen inside: the file, and the prefix's folders of libraries."""
        return [self.file, *(self.prefix / name for name in self.folders())]

    def folders(self) -> list[str]:
        """Names of the prefix's folders of libraries."""
        return [name for name in ("lib", "lib64") if (self.prefix / name).is_dir()]

    def covered(self) -> list[str]:
        """Folders of packages, as they are called inside: nothing of them is seen."""
        found = [f"{self.library}/{name}" for name in PACKAGES] + ["lib/python3/dist-packages"]
        return [f"/python/{name}" for name in found if (self.prefix / name).is_dir()]


def find() -> tuple[str, str]:
    """Bubblewrap's file and version. Raises UserError that says what to install."""
    file = shutil.which(COMMAND)
    if file is None:
        raise UserError(
            f"code of a model runs in sandboxes of bubblewrap, and there is no `{COMMAND}` in the PATH. Install the package "
            "bubblewrap: `apt install bubblewrap` on Debian and Ubuntu, `dnf install bubblewrap` on Fedora and RHEL."
        )
    try:
        said = subprocess.run([file, "--version"], capture_output=True, text=True, timeout=ASK_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"`{file} --version` does not work: {error}. Install bubblewrap anew.") from None
    version = said.split()[-1] if said.split() else "unknown"
    if _numbers(version) < LEAST_VERSION:
        wanted = ".".join(map(str, LEAST_VERSION))
        raise UserError(f"{file} is bubblewrap {version}; sandboxes need {wanted} or later. Install a newer package.")
    return file, version


def check_kernel(release: str | None = None) -> None:
    """Raises UserError where the kernel is too old to count processes by sandbox. release: default: this kernel's."""
    release = release or os.uname().release
    if _numbers(release) < LEAST_KERNEL:
        wanted = ".".join(map(str, LEAST_KERNEL))
        raise UserError(
            f"this is Linux {release}; sandboxes need {wanted} or later, which counts the processes of each by itself. Run "
            "what needs them on a machine with a newer kernel."
        )


def command(file: str, python: Interpreter, limits: Limits, *, seccomp: int, channel: int, runner: str) -> list[str]:
    """The words that start one sandbox.

    seccomp: an open file with the filter. channel: an open socket for the runner. runner: its source.
    """
    words = [file, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
    words += ["--uid", str(INSIDE_USER), "--gid", str(INSIDE_USER), "--hostname", "sandbox", "--clearenv"]
    for name, value in ENVIRONMENT.items():
        words += ["--setenv", name, value]
    for place in LIBRARIES:
        if os.path.islink(place):
            words += ["--symlink", os.readlink(place), place]
        elif os.path.isdir(place):
            words += ["--ro-bind", place, place]
    words += ["--ro-bind-try", ZONES, ZONES]
    for name in python.folders():
        words += ["--ro-bind", str(python.prefix / name), f"/python/{name}"]
    words += ["--ro-bind", str(python.file), "/python/bin/python3"]
    for covered in python.covered():
        words += ["--size", "4096", "--tmpfs", covered, "--remount-ro", covered]
    for name in DEVICES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    words += ["--symlink", f"/tmp/{STDIN}", "/dev/stdin", "--symlink", "/tmp", "/dev/shm"]
    words += ["--size", str(limits.disk_bytes), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]
    words += ["--cap-drop", "ALL", "--seccomp", str(seccomp), "--"]
    return [*words, "/python/bin/python3", "-I", "-S", "-X", "utf8", "-c", runner, str(channel)]


def process_limits(limits: Limits) -> list[tuple[str, int]]:
    """The rlimits of a program's processes, by the names of Python's `resource`.

    Address space is above the memory, since threads reserve what they never touch.
    """
    return [
        ("RLIMIT_CPU", int(limits.cpu_s) + 1),
        ("RLIMIT_AS", limits.memory_bytes + 2**30),
        ("RLIMIT_FSIZE", limits.file_bytes),
        ("RLIMIT_NOFILE", limits.open_files),
        ("RLIMIT_NPROC", limits.processes + 1),  # bubblewrap's first process in the namespace counts
        ("RLIMIT_CORE", 0),
        ("RLIMIT_MSGQUEUE", 0),
        ("RLIMIT_MEMLOCK", 0),
    ]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
