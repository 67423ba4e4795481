"""Ray's own processes on the driver's machine: without them nothing of a run goes on, and nobody else says so.

The raylet starts and watches the run's processes; the GCS is where Ray's processes find each other. Where one of them has
ended, what the driver sees first is something else: a server that seems to have died, or nothing at all for a minute.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ray._private import parameter, ray_constants, services

from megarl.cluster import ray_process, ray_setup_worker
from megarl.core import janitor
from megarl.core.errors import WorkerDiedError
from megarl.core.loading import as_if_missing
from megarl.serving.process import GUARD

ROLES = {
    "raylet": "Ray's raylet, which starts and watches all processes of the run on this machine,",
    "gcs_server": "Ray's GCS, by which all processes of the run find each other,",
}
# What a raylet starts beside the run's processes, and the variable by which it tells them who it is.
AGENTS = (ray_constants.PROCESS_TYPE_DASHBOARD_AGENT, ray_constants.PROCESS_TYPE_RUNTIME_ENV_AGENT)
RAYLET = "RAY_RAYLET_PID"
PROCESS, SETUP = Path(ray_process.__file__), Path(ray_setup_worker.__file__)


class RayDiedError(WorkerDiedError):
    """Ray itself has ended under the run; whatever else is seen follows from that."""


@dataclass(frozen=True)
class Service:
    """One of them. handle: a pidfd."""

    name: str
    pid: int
    handle: int


class Services:
    """Watches some processes, without polling them."""

    def __init__(self, services: Sequence[Service] = ()) -> None:
        self._services = tuple(services)
        self._poll = select.poll()
        for service in self._services:
            self._poll.register(service.handle, select.POLLIN)

    @classmethod
    def find(cls, node: str) -> Services:
        """Those of a node of Ray's, which is to be this machine. node: Ray's name for it."""
        marks = {f"--node_id={node}", f"--node-id={node}"}
        found = []
        for pid in janitor.everybody():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                name = words[0].rpartition("/")[2]
                if name in ROLES and marks.intersection(words):
                    found.append(Service(name, pid, os.pidfd_open(pid)))
            except OSError:
                continue  # it ended meanwhile, or it is another user's
        return cls(found)

    @property
    def pids(self) -> dict[str, int]:
        """By name."""
        return {service.name: service.pid for service in self._services}

    def ended(self) -> str:
        """What has ended and how, for people; empty where everything runs. Takes no time."""
        gone = {handle for handle, _ in self._poll.poll(0)}
        return " ".join(
            f"{ROLES[service.name]} has ended (pid {service.pid}{_how(service)}): nothing of the run can go on without it."
            for service in self._services
            if service.handle in gone
        )

    def let_go_on(self) -> None:
        """Those that somebody has stopped: Ray's own end waits for them, and knows no deadline."""
        for service in self._services:
            with suppress(ProcessLookupError):  # it has ended
                signal.pidfd_send_signal(service.handle, signal.SIGCONT)

    def close(self) -> None:
        """Watch nothing any more."""
        for service in self._services:
            self._poll.unregister(service.handle)
            os.close(service.handle)
        self._services = ()


@contextmanager
def with_few_processes() -> Iterator[None]:
    """Within, a Ray that starts has no monitor that scales it, none that carries its logs to the driver, and no dashboard.

    There is nothing to scale, and logs are left where they are written; a dashboard that is not included would only report usage.
    Each costs half a second of a core at every start, Ray waits a second for the last as it begins, and one for the first in
    the end. `ray start` has options for the monitors, `ray.init` of 2.60 has none. Workers begin as ray_process.py has it. What
    a dashboard needs is as if it were not installed: Ray would load it into this process, to find out.
    """
    made, dashboard = parameter.RayParams, services.start_api_server
    begin = {"setup_worker_path": str(SETUP), "worker_path": str(PROCESS)}
    parameter.RayParams = partial(made, no_monitor=True, include_log_monitor=False, **begin)
    services.start_api_server = lambda *_words, **_settings: ("", None)  # its address, and its process
    try:
        with as_if_missing(ray_process.DASHBOARD):
            yield
    finally:
        parameter.RayParams, services.start_api_server = made, dashboard


@contextmanager
def ending_with_raylet() -> Iterator[None]:
    """Within, a Ray that starts has agents that the kernel ends as soon as their raylet has ended, however it did.

    They carry no run's id. Where driver and janitor are killed at once, raylet and GCS go with them, and Ray's agents (2.60)
    would ask a GCS that is gone for a minute to tell somebody of it.
    """
    made = services._build_python_executable_command_memory_profileable

    def guarded(component: str, *words: Any, **settings: Any) -> list[str]:
        command: list[str] = made(component, *words, **settings)
        guard = [sys.executable, "-I", "-S", str(GUARD), RAYLET]
        return [*guard, *command, str(PROCESS)] if component in AGENTS else command

    services._build_python_executable_command_memory_profileable = guarded
    try:
        yield
    finally:
        services._build_python_executable_command_memory_profileable = made


def _how(service: Service) -> str:
    try:
        end = os.waitid(os.P_PIDFD, service.handle, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return ""  # somebody else has started it, and knows
    if end is None:
        return ""
    if end.si_code == os.CLD_EXITED:
        return f", exit code {end.si_status}"
    hint = ", as the kernel's out-of-memory killer sends it: see dmesg" if end.si_status == 9 else ""
    return f", by signal {end.si_status}{hint}"
