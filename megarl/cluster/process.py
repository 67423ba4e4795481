"""What every actor process of a run does first: its folder, its own log file, its network interface, stacks on request."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from megarl.cluster.network import interface_of
from megarl.core.limits import raise_open_files
from megarl.core.process_state import started_at
from megarl.core.progress import SUFFIX

LOOPBACK = "127.0.0.1"
# Megarl's own request for all stacks of a process; the handler runs even while the process hangs in native code.
STACK_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True)
class ProcessSpec:
    """How an actor's process names itself, where it works and writes, and by which address others reach it."""

    name: str  # for people: "actor rank 0", "collector", "server 1"
    logs: Path
    address: str = LOOPBACK  # of its node
    cwd: Path | None = None  # the driver's: what relative paths in a recipe start from; None stays where it is

    @property
    def log(self) -> Path:
        """Everything that the process prints."""
        return self._file(".log")

    @property
    def progress(self) -> Path:
        """How far its operation is (core/progress.py)."""
        return self._file(SUFFIX)

    @property
    def collectives(self) -> Path:
        """Where a rank's last collectives go when they are asked for (training/collectives.py)."""
        return self._file(".collectives")

    @property
    def stack(self) -> Path:
        """Where the stacks go when they are asked for."""
        return self._file(".stack")

    def _file(self, suffix: str) -> Path:
        return self.logs / f"{self.name.replace(' ', '_')}{suffix}"


@dataclass(frozen=True)
class ProcessFacts:
    """Where an actor's process runs. started: with the pid it names one process (process_state.started_at)."""

    pid: int
    host: str
    address: str = LOOPBACK
    started: int = 0


UNKNOWN = ProcessFacts(0, "?")  # of a process that has not said it yet


def configure_process(spec: ProcessSpec) -> ProcessFacts:
    """Send this process's output to its log file and have it write all stacks when STACK_SIGNAL arrives.

    Collectives of this process and of those that it starts use the interface of its node's address. They find what is
    installed beside their Python, as in an environment that is activated, and may have many files open.
    """
    if spec.cwd is not None:
        os.chdir(spec.cwd)
    if interface := interface_of(spec.address):
        # Who names an interface for the job knows better. NCCL takes names for prefixes without the equals sign.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    _put_first(Path(sys.executable).parent)
    raise_open_files()
    spec.logs.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    output = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.close(output)
    spec.collectives.unlink(missing_ok=True)  # of an earlier process of this name
    faulthandler.enable()
    # The file stays open for the life of the process: a signal handler cannot open one.
    faulthandler.register(STACK_SIGNAL, file=spec.stack.open("w"), all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {STACK_SIGNAL})  # Ray's processes hold it back (cluster/runtime)
    return ProcessFacts(os.getpid(), socket.gethostname(), spec.address, started_at(os.getpid()))


def _put_first(folder: Path) -> None:
    """Servers compile kernels as they start, by programs that packages bring (ninja)."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if str(folder) not in folders:
        os.environ["PATH"] = os.pathsep.join([str(folder), *folders])
