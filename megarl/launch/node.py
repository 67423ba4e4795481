"""One node of a job: starts this node's part of the job's Ray, and ends it with everything in it.

    RAY_AUTH_MODE=token RAY_AUTH_TOKEN=... python -m megarl.launch.node --head 10.0.0.1:26000 --run-id 5f0c --temp /tmp/megarl-7

The node that has the head's address starts the head, every other one joins it; all of them listen on the node's own
address, on ports that are free. It says on its standard output how far it is (words.py), and goes on until its standard
input ends: whoever started it needs nothing but to close that, and a leader that is killed has closed it too.

Not for a run on one machine: `megarl train` starts its own Ray. Standard library only: it must start fast.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from megarl.core import janitor
from megarl.core.limits import raise_open_files
from megarl.core.platform import visible_cuda_devices
from megarl.core.ports import free_port
from megarl.core.scratch import make_folder
from megarl.core.terminal import outlive_terminal
from megarl.launch.words import ALIVE_EVERY_S, Message, Word

RAY_START = "megarl.cluster.ray_start"
RAY_STARTED = "Ray runtime started."
POLL_S = 0.2
LOG_LINES = 25
CPUS_PER_GPU = 2  # a rank and a server, at the least


class NodeError(Exception):
    """This node cannot be part of the job."""


@dataclass(frozen=True)
class NodeSpec:
    """One node's part of a job's Ray.

    head: address and port of the job's head. run_id: marks this node's processes for the janitor. temp: folder for
    sockets and logs, short and on this node's own disk; removed in the end. resources: beside the GPUs that Ray finds.
    """

    head: str
    run_id: str
    temp: Path
    cpus: int
    resources: dict[str, float]
    deadline_s: float

    @property
    def registry(self) -> Path:
        """File with names of shared memory to remove in the end."""
        return self.temp / "shared_memory.txt"

    @property
    def head_place(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.head.rpartition(":")
        return host, int(port)


def own_address(peer: str) -> str:
    """The address of this machine from which it reaches another; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])


def input_ended(timeout_s: float) -> bool:
    """Wait a moment; whether standard input has ended meanwhile. What is typed for another job of the terminal is left alone."""
    handle = sys.stdin.fileno()
    if not select.select([handle], [], [], timeout_s)[0]:
        return False
    if _is_in_background(handle):  # the system would stop who reads it, and Ray with it
        time.sleep(timeout_s)
        return False
    try:
        return not os.read(handle, 4096)
    except OSError:
        return not _is_in_background(handle)  # it may be since a moment ago; else the terminal is gone


def _is_in_background(handle: int) -> bool:
    try:
        return os.tcgetpgrp(handle) != os.getpgrp()
    except OSError:
        return False  # no terminal, or one that is gone


def ray_command(spec: NodeSpec, address: str) -> list[str]:
    """`ray start` for this node. Nothing has a fixed port but the head: other jobs may run on the same node."""
    resources = ",".join(f'"{name}": {count}' for name, count in spec.resources.items())
    host, port = spec.head_place
    if address == host:
        role = ["--head", f"--port={port}", "--include-dashboard=false", f"--ray-client-server-port={free_port(host)}"]
    else:
        role = [f"--address={spec.head}"]
    return [
        *(sys.executable, "-m", RAY_START, "start", "--block", *role),
        *(f"--node-ip-address={address}", f"--temp-dir={spec.temp}", f"--num-cpus={spec.cpus}"),
        *(f"--resources={{{resources}}}", "--min-worker-port=0", "--max-worker-port=0"),
        *("--dashboard-agent-listen-port=0", "--include-log-monitor=false", "--disable-usage-stats", "--no-monitor"),
    ]


def few_cpus(spec: NodeSpec, gpus: int) -> str:
    """What is to be said of a node whose GPUs would wait for its CPUs, after its name; nothing where they are enough."""
    # Where a resource is named, processes stand for devices.
    if spec.resources or spec.cpus >= CPUS_PER_GPU * gpus:
        return ""
    return (
        f"gives this job {spec.cpus} CPUs for {gpus} GPUs: fewer than {CPUS_PER_GPU} a GPU make the run slow. Ask SLURM for more "
        "(megarl submit --cpus-per-task), or for whole nodes, which a job gets that says nothing of CPUs and memory."
    )


class Node:
    """This node, from its start to its end."""

    def __init__(self, spec: NodeSpec) -> None:
        self._spec = spec
        self._address = own_address(spec.head_place[0])
        self._name = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        self._log = spec.temp / "ray_start.log"
        self._registry = spec.registry
        self._told_to_end = False

    def end(self, number: int, frame: FrameType | None) -> None:
        """Of a signal. No exception: it could come between the folder and what has it removed, or into the cleaning."""
        self._told_to_end = True

    def run(self) -> None:
        """Start, say so, and wait for the end of standard input. Raises NodeError."""
        spec = self._spec
        self._say("started")
        if few := few_cpus(spec, len(visible_cuda_devices())):
            print(f"megarl: warning: {self._name} ({self._address}) {few}", file=sys.stderr, flush=True)
        try:
            make_folder(spec.temp.parent, spec.temp.name)
        except OSError as error:
            raise self._failed(f"{self._name} cannot make the folder {spec.temp}: {error.strerror}") from error
        # Outlives this process where it is killed alone, and removes what it has left.
        guard = janitor.start(spec.run_id, self._registry, folders=[spec.temp])
        try:
            end = time.monotonic() + spec.deadline_s
            if self._address != spec.head_place[0]:
                self._await_head(end)
            ray = self._start_ray()
            self._await(ray, end, RAY_STARTED)
            self._say("ready")
            self._await(ray, None)
        except NodeError as error:
            raise self._failed(str(error)) from error
        finally:
            janitor.clean(spec.run_id, self._registry, folders=[spec.temp], but=[guard.pid])
            guard.kill()
            guard.wait()

    def _failed(self, why: str) -> NodeError:
        print(f"megarl: {why}", file=sys.stderr, flush=True)
        self._say("failed")
        return NodeError(why)

    def _start_ray(self) -> subprocess.Popen[bytes]:
        raise_open_files()
        with self._log.open("wb") as log:
            return subprocess.Popen(
                ray_command(self._spec, self._address),
                env={**os.environ, janitor.RUN_ID_VARIABLE: self._spec.run_id, "RAY_TMPDIR": str(self._spec.temp)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _await_head(self, end: float) -> None:
        """Until the head listens."""
        while True:
            try:
                socket.create_connection(self._spec.head_place, timeout=1.0).close()
                return
            except OSError as error:
                if time.monotonic() > end:
                    raise NodeError(
                        f"{self._name} ({self._address}) cannot reach the head at {self._spec.head}: {error}"
                    ) from error
            self._heed(POLL_S)

    def _await(self, ray: subprocess.Popen[bytes], end: float | None, text: str | None = None) -> None:
        """Until Ray has said so; without a text, until standard input ends."""
        said = time.monotonic()
        while text is None or text not in self._log.read_text(errors="replace"):
            if ray.poll() is not None:
                raise NodeError(f"Ray ended on {self._name} (exit code {ray.returncode}):\n{self._log_tail()}")
            if end is not None and time.monotonic() > end:
                raise NodeError(f"Ray did not start on {self._name} in time:\n{self._log_tail()}")
            if time.monotonic() - said >= ALIVE_EVERY_S:
                said = time.monotonic()
                self._say("alive")
            self._heed(POLL_S)

    def _heed(self, timeout_s: float) -> None:
        """Wait a moment; raises EndOfJob when the leader has closed standard input, or a signal has come."""
        if input_ended(timeout_s) or self._told_to_end:
            raise EndOfJob

    def _log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES:])

    def _say(self, word: Word) -> None:
        try:
            print(Message(word, self._name, self._address).line(), flush=True)
        except BrokenPipeError:
            raise EndOfJob from None


class EndOfJob(Exception):
    """The leader is done, or gone."""


def _place(text: str) -> str:
    """Of the head. A name is none: nodes tell by the address which of them the head is."""
    host, _, port = text.rpartition(":")
    try:
        ipaddress.IPv4Address(host)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} has to be address:port, with the IPv4 address by which all nodes reach the head: 10.0.0.1:26000"
        ) from error
    if not port.isdigit() or not 0 < int(port) < 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} names no port from 1 to {2**16 - 1}")
    return text


def _resource(text: str) -> tuple[str, float]:
    name, _, count = text.partition("=")
    return name, float(count)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 0 when the leader ended the job, 1 when this node could not go on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--head", required=True, type=_place, help="address:port of the job's head")
    parser.add_argument("--run-id", required=True, help="marks the processes of this job")
    parser.add_argument("--temp", required=True, type=Path, help="folder to make, on this node's own disk; short")
    parser.add_argument("--resource", type=_resource, action="append", default=[], help="name=count, beside GPUs")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds until Ray has to run here")
    parser.add_argument("--sweep", action="store_true", help="only remove what a node that was killed has left")
    options = parser.parse_args(arguments)
    outlive_terminal()
    cpus = len(os.sched_getaffinity(0))
    spec = NodeSpec(
        options.head,
        options.run_id,
        options.temp,
        cpus,
        dict(options.resource),
        options.deadline,
    )
    if options.sweep:
        janitor.clean(spec.run_id, spec.registry, folders=[spec.temp])
        return 0
    node = Node(spec)
    signal.signal(signal.SIGTERM, node.end)
    signal.signal(signal.SIGINT, node.end)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # of a terminal that is closed; nohup has it ignored
        signal.signal(signal.SIGHUP, node.end)
    signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # whoever reads a terminal from the background gets an error instead
    try:
        node.run()
    except EndOfJob:
        return 0
    except NodeError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
