"""The small actor that looks after one node of a run: what it has, whom it reaches, and that nothing is left on it."""

from __future__ import annotations

import os
import platform
import socket
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from megarl.cluster.checks import NodeFacts
from megarl.cluster.network import Echo, interface_of, probe_all
from megarl.cluster.stacks import foreign_stack
from megarl.core import janitor
from megarl.core.endings import Ending, Endings
from megarl.core.ports import kept_port
from megarl.core.process_state import stopped_of
from megarl.core.scratch import REGISTRY, make_folder, temporary
from megarl.core.versions import code_digest, installed
from megarl.hub.fetch import fetch_again

COMPARED = ("torch", "megatron-core", "sglang", "sglang-router", "transformers", "ray", "numpy")
PORTS_KEPT = 64  # more servers than start at once on a node
GONE = "the process has ended"


class NodeActor:
    """Looks after one node. A janitor of its own outlives it, and so the driver, by a moment."""

    def __init__(self, address: str, run_id: str) -> None:
        self._address = address
        self._run_id = run_id
        self._temp = make_folder(Path(tempfile.gettempdir()))
        temporary(self._temp).mkdir()
        self._echo: Echo | None = None
        self._kept: deque[socket.socket] = deque(maxlen=PORTS_KEPT)  # one that is pushed out is closed
        self._endings = Endings()
        janitor.start(run_id, self._temp / REGISTRY, folders=[self._temp], detached=True)

    def facts(self, paths: Mapping[Path, Path]) -> NodeFacts:
        """What has to be equal on all nodes, and which paths are not there. paths: by what tells that it is there."""
        interface = interface_of(self._address)
        if interface and self._echo is None:
            self._echo = Echo(self._address)
        return NodeFacts(
            name=socket.gethostname(),
            address=self._address,
            interface=interface,
            port=self._echo.port if self._echo else 0,
            temp=self._temp,
            versions={
                "python": platform.python_version(),
                "megarl's code": code_digest(),
                **{name: installed(name) or "not installed" for name in COMPARED},
            },
            missing=tuple(path for witness, path in paths.items() if not witness.exists()),
        )

    def fetch(self, paths: Sequence[Path]) -> str:
        """Get what is a copy of something on the hub and is not here; what was wrong, or nothing."""
        return next(filter(None, map(fetch_again, paths)), "")

    def clock(self) -> float:
        """Seconds since 1970, by this node's clock."""
        return time.time()

    def free_port(self) -> int:
        """A port on this node's address that whoever asked has to itself until several others have asked."""
        self._kept.append(kept_port(self._address))
        return int(self._kept[-1].getsockname()[1])

    def probe(self, peers: Sequence[tuple[str, int]], timeout_s: float) -> list[str]:
        """Reach other nodes; for each what went wrong, or nothing."""
        return probe_all(peers, timeout_s)

    def signal(self, pid: int, number: int) -> str:
        """Send a signal to a process of the run; why not, or nothing."""
        if pid not in janitor.processes_of(self._run_id):
            return GONE
        os.kill(pid, number)
        return ""

    def stopped(self) -> list[str]:
        """Processes of the run here that stand still, for people."""
        return [str(each) for each in stopped_of(self._run_id)]

    def foreign_stack(self, pid: int) -> str:
        """All stacks of a process here, read from outside; or why there are none."""
        return foreign_stack(pid)

    def watch(self, pid: int, started: int) -> None:
        """Hold on to a process here, so that its end can be told."""
        self._endings.watch(pid, started)

    def ending(self, pid: int, started: int) -> Ending:
        """How a process here ended."""
        return self._endings.told(pid, started)

    def end(self, pids: Sequence[int]) -> None:
        """Kill these processes of the run."""
        end_of_run(self._run_id, pids)

    def clean(self) -> int:
        """End what Ray does not know of: every process of the run here that is no worker of its; how many there were.

        Ray ends its workers itself, and reports those as failed that somebody else has ended. The janitor comes last.
        """
        workers = [pid for pid in janitor.processes_of(self._run_id) if _parent(pid) == os.getppid()]
        found = janitor.segments_of(workers) - janitor.mapped_elsewhere(self._run_id)
        janitor.register_segments(self._temp / REGISTRY, found)
        return len(janitor.clean(self._run_id, self._temp / REGISTRY, but=workers).pids)


def _parent(pid: int) -> int:
    try:
        return int(psutil.Process(pid).ppid())
    except psutil.NoSuchProcess:
        return 0  # it ended meanwhile


def end_of_run(run_id: str, pids: Sequence[int]) -> None:
    """Kill those of these processes here that are of the run, and wait until they have ended."""
    mine = set(janitor.processes_of(run_id))
    janitor.kill_all([pid for pid in pids if pid in mine])
