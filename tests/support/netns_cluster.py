"""Several nodes on one machine: network namespaces on a bridge, each with its own address, hostname, processes and memory.

Needs root. A node is what its holder holds: `power_off` kills that, and everything in the node with it. The folders of
the machine are shared by all nodes, as a network file system would be, but /tmp/ray and /dev/shm are each node's own.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from megarl.core.ray_env import HEALTH_CHECKS
from megarl.launch.node import RAY_START

ROOT = Path(__file__).parents[2]
RAY_PORT = 6379
START_S = 180.0  # on a machine that does much else
POLL_S = 0.1
# The holder is the first process of the node, and takes in what others leave.
HOLDER = """
set -e
hostname {name}
mount -t proc proc /proc
mount -t tmpfs -o size=2g tmpfs /dev/shm
mkdir -p /tmp/ray
mount -t tmpfs tmpfs /tmp/ray
ip link set lo up
ip addr replace {address}/24 dev eth0
ip link set eth0 up
echo up
exec {python} -c 'import os, signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); signal.pause()'
"""
# Asks in one process: each would have to load Ray anew.
WAIT_FOR_RAY = """
import select, socket
while socket.socket().connect_ex(({host!r}, {port})):
    select.select([], [], [], 0.1)
import ray
ray.init("{host}:{port}", logging_level="error")
alive = lambda: sum(node["Alive"] for node in ray.nodes())
while alive() != {count}:
    select.select([], [], [], 0.1)
print(alive())
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@dataclass
class Node:
    """One node. link: the machine's end of its cable."""

    name: str
    address: str
    link: str
    namespace: str
    env: Mapping[str, str]
    holder: subprocess.Popen[str] = field(init=False)
    pid: int = field(init=False)  # of the holder, as the machine sees it
    is_cut: bool = False

    def power_on(self) -> None:
        """Start the node; also once more, after power_off."""
        script = HOLDER.format(name=self.name, address=self.address, python=sys.executable)
        unshare = ["unshare", "--uts", "--mount", "--propagation", "slave", "--pid", "--fork", "--kill-child"]
        self.holder = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *unshare, "bash", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.holder.stdout is not None
        assert self.holder.stdout.readline() == "up\n", f"{self.name} did not start"
        [child] = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children").read_text().split()
        self.pid = int(child)

    def command(self, argv: Sequence[str]) -> list[str]:
        """What runs `argv` inside of the node."""
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", "--pid", f"--wd={ROOT}", "--", *argv]

    def popen(self, argv: Sequence[str], **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.env, **env},
        )

    def run(self, argv: Sequence[str], timeout_s: float = 60.0, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.popen(argv, **env)
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def cut(self) -> None:
        """Pull the cable."""
        self.is_cut = True
        ip("link", "set", self.link, "down")

    def mend(self) -> None:
        self.is_cut = False
        ip("link", "set", self.link, "up")

    def power_off(self) -> None:
        self.holder.kill()
        self.holder.wait()


@dataclass
class Nodes:
    """All nodes; the first is Ray's head."""

    nodes: list[Node]
    env: dict[str, str]
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __getitem__(self, index: int) -> Node:
        return self.nodes[index]

    @property
    def ray_address(self) -> str:
        return f"{self.nodes[0].address}:{RAY_PORT}"

    def start_ray(self, index: int, resources: Mapping[str, float], num_gpus: int = 0, **env: str) -> None:
        """Start Ray on a node; returns at once."""
        node = self.nodes[index]
        where = ["--head", f"--port={RAY_PORT}"] if index == 0 else [f"--address={self.ray_address}"]
        argv = [
            *(sys.executable, "-m", RAY_START, "start", "--block", "--disable-usage-stats"),
            *("--no-monitor", "--include-log-monitor=false"),
            *where,
            f"--node-ip-address={node.address}",
            *("--num-cpus=2", f"--num-gpus={num_gpus}"),
            f"--resources={json.dumps(dict(resources))}",
            *(["--include-dashboard=false"] if index == 0 else []),
        ]
        self.daemons.append(
            subprocess.Popen(
                node.command(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**self.env, **env},
            )
        )

    def wait_for_ray(self, count: int) -> None:
        """Until so many nodes have come."""
        code = WAIT_FOR_RAY.format(host=self.nodes[0].address, port=RAY_PORT, count=count)
        end = time.monotonic() + START_S
        # It ends at once where the head listens and does not answer yet.
        while self.nodes[0].run([sys.executable, "-c", code], START_S).stdout.strip() != str(count):
            assert time.monotonic() < end, f"{count} nodes did not come within {START_S} s"
            select.select([], [], [], POLL_S)

    def cut_between(self, first: int, second: int) -> None:
        """Let nothing pass between two nodes, without an answer; all other links stay."""
        for here, there in ((first, second), (second, first)):
            words = ["neigh", "replace", self.nodes[there].address, "lladdr", "02:00:00:00:00:01", "dev", "eth0"]
            done = self.nodes[here].run(["ip", *words, "nud", "permanent"])
            assert done.returncode == 0, done.stderr

    def mend_between(self, first: int, second: int) -> None:
        for here, there in ((first, second), (second, first)):
            self.nodes[here].run(["ip", "neigh", "del", self.nodes[there].address, "dev", "eth0"])


@contextmanager
def nodes(count: int) -> Iterator[Nodes]:
    """So many nodes, without Ray; everything in them ends with the context."""
    mark = secrets.token_hex(3)
    subnet = f"10.{100 + secrets.randbelow(100)}.{secrets.randbelow(250)}"
    # What a run in this process has told its own Ray is not for another.
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MEGARL_", "CUDA_"))}
    env = {
        **mine,
        **HEALTH_CHECKS,
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # as in tests/conftest.py
    }
    with ExitStack() as ended:
        bridge = f"mgb{mark}"
        ip("link", "add", bridge, "type", "bridge")
        ended.callback(ip, "link", "del", bridge)
        ip("link", "set", bridge, "up")
        made = Nodes([], env)
        for index in range(1, count + 1):
            made.nodes.append(_node(ended, bridge, mark, index, f"{subnet}.{index}", env))
        yield made
        for node in made.nodes:
            node.power_off()
        for daemon in made.daemons:
            daemon.wait()


def _node(ended: ExitStack, bridge: str, mark: str, index: int, address: str, env: Mapping[str, str]) -> Node:
    namespace, link = f"mg{mark}-{index}", f"mgv{mark}{index}"
    ip("netns", "add", namespace)
    ended.callback(ip, "netns", "del", namespace)
    ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    ip("link", "set", link, "master", bridge)
    ip("link", "set", link, "up")
    node = Node(f"node{index}", address, link, namespace, env)
    node.power_on()
    ended.callback(node.power_off)
    return node
