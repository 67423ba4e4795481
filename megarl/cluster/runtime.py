"""The Ray of one run: its own, on this machine, or one over several nodes that a job has started and that it joins.

A Ray of its own has a secret and a temporary folder, and ends with everything in it. One that was joined goes on, and
nothing of the run is left on its nodes.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from megarl.cluster.network import address_towards
from megarl.cluster.nodes import Node, Nodes
from megarl.cluster.process import LOOPBACK, ProcessSpec
from megarl.cluster.services import Services, ending_with_raylet, with_few_processes
from megarl.cluster.slots import Slot, reserve
from megarl.core import janitor
from megarl.core.errors import MegarlError, UserError
from megarl.core.exit_codes import FAULT
from megarl.core.interrupts import is_termination
from megarl.core.limits import tight
from megarl.core.log import get_logger
from megarl.core.platform import Platform
from megarl.core.ray_env import OVERRIDE_VARIABLE, RAY_ADDRESS_VARIABLE, RunningRay, ray_to_join
from megarl.core.scratch import Scratch
from megarl.core.stop import STOP_SIGNAL

log = get_logger(__name__)

CONNECT_S = 10.0
# RFC 9113, 3.4 and 6.5: each side begins with a frame of settings, whose head has its type at the fourth byte.
SETTINGS, SETTINGS_BYTES, GREET_S = 4, 9, 30.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, SETTINGS, 0, 0, 0, 0, 0])
SLOW_START = "timed out during startup"  # Ray's words, as of 2.60
SIGACTION_BYTES = 512  # more than the system's structure takes
PUT_BACK_S = 0.001


@dataclass
class Runtime:
    """What every process of the run needs to know. Use as a context manager: leaving it leaves nothing behind.

    folder: the run's folder, absolute. api_key: the servers' and the router's. scratch: on the driver's machine. closes:
    whether the scratch folder goes with it. nodes: the driver's first. slots: one a rank, in the order of the ranks. reached:
    whether servers elsewhere have to reach processes of the run. asked_threads: OMP_NUM_THREADS, where the driver was
    started with one. spares: nodes that are there in the place of others.
    """

    platform: Platform
    folder: Path
    api_key: str
    scratch: Scratch
    closes: bool = True
    nodes: Nodes = field(default_factory=lambda: Nodes(()))
    slots: tuple[Slot, ...] = ()
    reached: bool = False
    asked_threads: int | None = None
    spares: int = 0
    before: dict[str, str | None] = field(default_factory=dict)  # variables of this process's environment, as they were

    def threads(self, together: int) -> int | None:
        """Threads of each of so many processes of the run that compute at the same time; None: nothing is to be said."""
        if self.asked_threads is not None:
            return self.asked_threads
        return self.platform.threads(-(-together // len(self.nodes.members)))

    def rank_threads(self, together: int) -> int:
        """Threads of each of so many ranks: where devices compute, Ray would leave the host's work to a single one."""
        return self.threads(together) or self.platform.host_threads(-(-together // len(self.nodes.members)))

    @property
    def run_id(self) -> str:
        """Marks every process of the run."""
        return self.scratch.run_id

    @property
    def logs(self) -> Path:
        """Folder of the log of every process."""
        return self.folder / "logs"

    @property
    def here(self) -> Node:
        """The driver's node."""
        return self.nodes.members[0]

    def address_of(self, node: Node) -> str:
        """Where a node's processes listen: on its loopback where nobody elsewhere could want to reach them."""
        return node.address if self.reached or len(self.nodes.members) > 1 else LOOPBACK

    def process(self, name: str, node: Node | None = None) -> ProcessSpec:
        """How a process of the run begins; on the driver's node where none is given."""
        return ProcessSpec(name, self.logs, self.address_of(node or self.here), Path.cwd())

    @classmethod
    def start(
        cls,
        platform: Platform,
        folder: Path,
        num_devices: int,
        reads: Sequence[Path] = (),
        scratch: Scratch | None = None,
        reached_from: Sequence[str] = (),
        spares: int = 0,
    ) -> Runtime:
        """Start Ray on this machine, or join the one that the environment names, and take a device for every rank.

        reads: what every node has to see, beside the run's folder. scratch: one of its own where not given. reached_from:
        hosts of servers that the run has not started. spares: nodes that are left alone. Raises UserError, DeadlineError and
        MegarlError; what was started is gone then.
        """
        folder = folder.resolve()
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        closes = scratch is None
        scratch = scratch or Scratch.open()
        run_id = scratch.run_id
        asked = os.environ.get("OMP_NUM_THREADS", "")
        changed = {**platform.env, janitor.RUN_ID_VARIABLE: run_id, OVERRIDE_VARIABLE: "1"}
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        log.info("run id %s: every process of the run carries it as %s", run_id, janitor.RUN_ID_VARIABLE)
        runtime = cls(platform, folder, secrets.token_hex(32), scratch, closes, spares=spares, before=before)
        runtime.asked_threads = int(asked) if asked.isdigit() and int(asked) else None
        own = address_towards(reached_from)
        runtime.reached = bool(own)
        try:
            running = ray_to_join()
            if running:
                _join_ray(running, run_id, platform)
                with _witness(folder, run_id) as witness:
                    paths = {witness: folder, **{path: path for path in (Path.cwd(), *reads)}}
                    runtime.nodes = Nodes.join(run_id, platform.ray_resource, num_devices, paths, spares)
            elif spares:
                raise UserError(
                    f"cluster.spares is {spares}, and the run is on this machine alone: {RAY_ADDRESS_VARIABLE} names no Ray of "
                    "several nodes. Leave the key out, or submit the run to a cluster (megarl submit)."
                )
            else:
                _start_ray(platform, run_id, num_devices, scratch)
                here, devices = ray.get_runtime_context().get_node_id(), ray.cluster_resources()
                count = int(devices.get(platform.ray_resource, 0))
                node = Node(socket.gethostname(), own or LOOPBACK, here, scratch.folder, count)
                runtime.nodes = Nodes((node,), run_id=run_id, services=Services.find(here))
            runtime.slots = reserve(platform, runtime.nodes.members, num_devices)
        except BaseException:
            runtime.close()
            raise
        return runtime

    def close(self) -> None:
        """End every process of the run, and the Ray that it started; remove its shared memory and temporary files."""
        if ray.is_initialized():
            self.nodes.clean()
            self.nodes.services.let_go_on()
            with _sigterm_heard():
                ray.shutdown()
        self.nodes.services.close()
        cleaned = janitor.clean(self.run_id, self.scratch.registry, but=[self.scratch.guard.pid])
        if cleaned.pids:
            log.info("ended %d processes that were still there", len(cleaned.pids))
        # A run that goes on in this process finds what its first start found.
        for name, value in self.before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self.closes:
            self.scratch.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.judge(error)
        self.close()

    def judge(self, error: BaseException | None) -> None:
        """What an error means that ends a run which has its devices."""
        if isinstance(error, UserError):
            error.exit_code = FAULT  # devices were taken: this is no refusal any more
        elif isinstance(error, MegarlError) and (self.nodes.lost() or (self.spares and self.nodes.await_lost())):
            # Its devices are gone. Where no spare has others, whoever gives out nodes has to start the run on some.
            error.recoverable = bool(self.spares) and self.nodes.replaceable()


def _start_ray(platform: Platform, run_id: str, num_devices: int, scratch: Scratch) -> None:
    """A Ray of the run's own. Raises MegarlError when it does not start."""
    settings: dict[str, Any] = {
        "address": "local",
        "num_cpus": max(os.cpu_count() or 1, 1),
        # GPUs are a resource that Ray finds by itself; virtual CPU devices are not.
        "resources": {} if platform.ray_resource == "GPU" else {platform.ray_resource: float(num_devices)},
        "include_dashboard": False,
        "_temp_dir": str(scratch.folder),
        "_node_ip_address": LOOPBACK,
        "namespace": run_id,
    }
    with with_few_processes(), ending_with_raylet():
        try:
            _init("on this machine", **settings)
        except MegarlError as error:
            if SLOW_START not in str(error):
                raise
            # It gives its own processes 30 s, and lets nobody say otherwise. On a busy machine the second start is faster.
            log.warning("%s It is started once more.", error)
            janitor.kill_all(janitor.processes_of(run_id, but=[scratch.guard.pid]))
            _init("on this machine", **settings)


def _greet(host: str, port: int) -> None:
    """See that HTTP/2 is spoken there, as by Ray, whose own start asks anything else for many minutes. Raises OSError."""
    with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return  # which it does behind a handshake
        connection.settimeout(GREET_S)
        connection.sendall(PREFACE)
        answer = connection.recv(SETTINGS_BYTES, socket.MSG_WAITALL)
    if len(answer) < SETTINGS_BYTES or answer[3] != SETTINGS:
        raise OSError("something else listens")


def _join_ray(running: RunningRay, run_id: str, platform: Platform) -> None:
    """The Ray that runs. Raises UserError where none answers, MegarlError where it does not take this run."""
    address, variable = running
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"{variable} is {address!r}: it has to be host:port, or not to be set.")
    try:
        _greet(host, int(port))
    except OSError as error:
        raise UserError(
            f"{variable} is {address}, and no Ray answers there: {error}. Start one on this node (megarl "
            "submit does), or unset the variable to run on this machine alone."
        ) from error
    # Ray's processes are not this run's; its workers are, and carry its id.
    env = {**platform.env, janitor.RUN_ID_VARIABLE: run_id}
    _init(f"at {address}", address=address, namespace=run_id, runtime_env={"env_vars": env})


@contextmanager
def _witness(folder: Path, run_id: str) -> Iterator[Path]:
    """A file that is on every node where the folder is the same one: another of that name has no such file."""
    witness = folder / f".{run_id}"
    witness.touch()
    try:
        yield witness
    finally:
        witness.unlink()


def _init(where: str, **settings: Any) -> None:
    try:
        with _own_signals():
            ray.init(log_to_driver=False, configure_logging=False, **settings)
    except Exception as error:
        said = " ".join(filter(None, (f"{str(error).rstrip('.')}.", tight())))
        raise MegarlError(f"Ray {where} did not start this run: {said}") from error


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keeps SIGTERM's handler: Ray puts one of its own there, which ends the process with an exit code of its own.

    What that one has raised by then is a SIGTERM for ours. And keeps Ray's processes from SIGHUP and the request to stop, as Ray
    itself keeps them from Ctrl-C: a terminal that is closed sends the one to all in its foreground, `timeout -s USR1` the other
    to all of its group, and without them nothing could be ended in order. They inherit that both are blocked, and their workers
    do.
    """
    on_terminate = signal.getsignal(signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, STOP_SIGNAL})

    def restore() -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_terminate)

    try:
        try:
            yield
        finally:
            restore()
    except SystemExit as end:
        restore()  # it may have come while the other was under way
        if is_termination(end):
            signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # what came meanwhile is heard now


@contextmanager
def _sigterm_heard() -> Iterator[None]:
    """Keeps SIGTERM's handler while Ray ends: its core, as it is closed, lets the system's own end this process (2.60,
    RayLog::UninstallSignalAction), for good, and before Ray waits for its processes. Python has no part in that, and lets nobody
    but the main thread, which waits for Ray, set a handler.
    """
    system, ours, ended = ctypes.CDLL(None), ctypes.create_string_buffer(SIGACTION_BYTES), threading.Event()
    system.sigaction(signal.SIGTERM, None, ours)

    def put_back() -> None:
        while not ended.wait(PUT_BACK_S):
            system.sigaction(signal.SIGTERM, ours, None)

    threading.Thread(target=put_back, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        system.sigaction(signal.SIGTERM, ours, None)
