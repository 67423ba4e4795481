"""The Ray of one run: its own, on this machine, or one over several nodes that a job has started and that it joins.

A Ray of its own has a secret and a temporary folder, and ends with everything in it. One that was joined goes on, and
nothing of the run is left on its nodes.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from megarl.cluster.nodes import REGISTRY, Node, Nodes
from megarl.cluster.process import LOOPBACK, ProcessSpec
from megarl.cluster.slots import Slot, reserve
from megarl.core import janitor
from megarl.core.errors import MegarlError, UserError
from megarl.core.log import get_logger
from megarl.core.platform import Platform
from megarl.core.ray_env import RAY_ADDRESS_VARIABLE

log = get_logger(__name__)

CONNECT_S = 10.0


@dataclass
class Runtime:
    """What every process of the run needs to know. Use as a context manager: leaving it leaves nothing behind.

    folder: the run's folder, absolute. run_id: marks every process of the run. api_key: the servers' and the router's.
    nodes: the driver's first. slots: one a rank, in the order of the ranks.
    """

    platform: Platform
    folder: Path
    run_id: str
    api_key: str
    temp: Path
    guard: subprocess.Popen[bytes]
    nodes: Nodes = field(default_factory=lambda: Nodes(()))
    slots: tuple[Slot, ...] = ()

    @property
    def logs(self) -> Path:
        """Folder of the log of every process."""
        return self.folder / "logs"

    @property
    def here(self) -> Node:
        """The driver's node."""
        return self.nodes.members[0]

    def address_of(self, node: Node) -> str:
        """Where a node's processes listen: on its loopback where there is no other node that could want to reach them."""
        return node.address if len(self.nodes.members) > 1 else LOOPBACK

    def process(self, name: str, node: Node | None = None) -> ProcessSpec:
        """How a process of the run begins; on the driver's node where none is given."""
        return ProcessSpec(name, self.logs, self.address_of(node or self.here), Path.cwd())

    @classmethod
    def start(cls, platform: Platform, folder: Path, num_devices: int, reads: Sequence[Path] = ()) -> Runtime:
        """Start Ray on this machine, or join the one that the environment names, and take a device for every rank.

        reads: what every node has to see, beside the run's folder. Raises UserError, DeadlineError and MegarlError; what
        was started is gone then.
        """
        run_id = secrets.token_hex(8)
        folder = folder.resolve()
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        # Ray's sockets live here and their paths must stay short.
        temp = Path(tempfile.mkdtemp(prefix="megarl-"))
        os.environ.update(platform.env)
        os.environ[janitor.RUN_ID_VARIABLE] = run_id
        log.info("run id %s: every process of the run carries it as %s", run_id, janitor.RUN_ID_VARIABLE)
        guard = janitor.start(run_id, temp / REGISTRY, folders=[temp])
        runtime = cls(platform, folder, run_id, secrets.token_hex(32), temp, guard)
        address = os.environ.get(RAY_ADDRESS_VARIABLE)
        try:
            if address:
                _join_ray(address, run_id, platform)
                with _witness(folder, run_id) as witness:
                    paths = {witness: folder, **{path: path for path in (Path.cwd(), *reads)}}
                    runtime.nodes = Nodes.join(run_id, platform.ray_resource, num_devices, paths)
            else:
                _start_ray(platform, run_id, num_devices, temp)
                here, devices = ray.get_runtime_context().get_node_id(), ray.cluster_resources()
                count = int(devices.get(platform.ray_resource, 0))
                runtime.nodes = Nodes((Node(socket.gethostname(), LOOPBACK, here, temp, count),))
            runtime.slots = reserve(platform, runtime.nodes.members, num_devices)
        except BaseException:
            runtime.close()
            raise
        return runtime

    def close(self) -> None:
        """End every process of the run, and the Ray that it started; remove its shared memory and temporary files."""
        if ray.is_initialized():
            self.nodes.clean()
            ray.shutdown()
        cleaned = janitor.clean(self.run_id, self.temp / REGISTRY, folders=[self.temp], but=[self.guard.pid])
        if cleaned.pids:
            log.info("ended %d processes that were still there", len(cleaned.pids))
        os.environ.pop(janitor.RUN_ID_VARIABLE, None)
        self.guard.kill()
        self.guard.wait()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _start_ray(platform: Platform, run_id: str, num_devices: int, temp: Path) -> None:
    """A Ray of the run's own. Raises MegarlError when it does not start."""
    _init(
        "on this machine",
        address="local",
        num_cpus=max(os.cpu_count() or 1, 1),
        # GPUs are a resource that Ray finds by itself; virtual CPU devices are not.
        resources={} if platform.ray_resource == "GPU" else {platform.ray_resource: float(num_devices)},
        include_dashboard=False,
        _temp_dir=str(temp),
        _node_ip_address=LOOPBACK,
        namespace=run_id,
    )


def _join_ray(address: str, run_id: str, platform: Platform) -> None:
    """The Ray at host:port. Raises UserError where none answers, MegarlError where it does not take this run."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"{RAY_ADDRESS_VARIABLE} is {address!r}: it has to be host:port, or not to be set.")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise UserError(
            f"{RAY_ADDRESS_VARIABLE} is {address}, and no Ray answers there: {error}. Start one on this node (megarl "
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
        with _own_handlers():
            ray.init(log_to_driver=False, configure_logging=False, **settings)
    except Exception as error:
        raise MegarlError(f"Ray {where} did not start this run: {error}") from error


@contextmanager
def _own_handlers() -> Iterator[None]:
    """Keeps SIGTERM's handler: Ray puts one of its own there, which ends the process with an exit code of its own."""
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_terminate)
