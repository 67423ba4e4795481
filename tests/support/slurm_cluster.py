"""A real SLURM on network namespaces: a login node with the controller, and compute nodes, each a machine of its own.

Needs root and the packages of tests/support/install_slurm.sh. It has its own munge, key and configuration: a SLURM of the
machine is not touched.
"""

from __future__ import annotations

import secrets
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.netns_cluster import Node, Nodes, nodes

UP_S = 30.0
POLL_S = 0.5  # what is asked is mostly one of SLURM's commands, and each costs a process
PARTITION = "main"
GPUS = 4  # that SLURM gives out on each node: any device files will do
CONFIG = """\
ClusterName=test
SlurmctldHost={login}({address})
SlurmUser=root
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
# A job that is queued again waits until its old credentials have expired.
AuthInfo=socket={root}/munge.socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldPidFile={root}/slurmctld.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
PropagateResourceLimits=NONE
KillWait=5
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName={partition} Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# The nodes know each other by name, and each has a disk of its own there.
SETTLE = "mount --bind {root}/hosts /etc/hosts; mount -t tmpfs tmpfs {disk}"


@dataclass
class SlurmCluster:
    """The first of the nodes is the login node; jobs run on the others."""

    nodes: Nodes
    root: Path
    disk: Path  # another folder on every node; its name is short, as sockets in it want it

    @property
    def login(self) -> Node:
        return self.nodes[0]

    @property
    def compute(self) -> list[Node]:
        return self.nodes.nodes[1:]

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes.nodes if node.name == name)

    def popen(self, argv: Sequence[str], **env: str) -> subprocess.Popen[str]:
        """On the login node."""
        return self.login.popen(argv, SLURM_CONF=str(self.root / "slurm.conf"), **env)

    def run(self, *argv: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        return self.login.run(argv, timeout_s, SLURM_CONF=str(self.root / "slurm.conf"))

    def ask(self, *argv: str) -> str:
        done = self.run(*argv)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def megarl(self, *words: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "megarl", *words, timeout_s=timeout_s)

    def start(self, node: Node) -> None:
        """Settle a node that has come up, and start SLURM on it."""
        done = node.run(["bash", "-ec", SETTLE.format(root=self.root, disk=self.disk)])
        assert done.returncode == 0, done.stderr
        if node is self.login:
            self._daemon(node, "munged", "--foreground", *self._munge())
            self.wait(lambda: (self.root / "munge.socket").exists())
            self._daemon(node, "slurmctld", "-D")
        else:
            self._daemon(node, "slurmd", "-D")

    def restart(self, node: Node) -> None:
        """Switch a node on again that was powered off."""
        node.power_on()
        self.start(node)
        self.wait_for_nodes()

    def wait_for_nodes(self) -> None:
        """Until every node takes jobs."""
        names = {node.name for node in self.compute}
        self.wait(lambda: names <= set(self.run("sinfo", "-hNt", "idle,alloc,mix", "-o", "%N").stdout.split()))

    def wait(self, done: Callable[[], bool], within_s: float = UP_S) -> None:
        end = time.monotonic() + within_s
        while not done():
            assert time.monotonic() < end, f"not within {within_s} s; {self.run('sinfo').stdout}"
            select.select([], [], [], POLL_S)

    def clear(self) -> None:
        """End all jobs."""
        self.run("scancel", "-u", "root")
        self.wait(lambda: not self.run("squeue", "-h").stdout.strip())

    def _munge(self) -> list[str]:
        return [
            "--force",  # its socket may lie in a folder that is not everybody's
            *(f"--key-file={self.root}/munge.key", f"--socket={self.root}/munge.socket"),
            *(f"--{name}-file={self.root}/munged.{name}" for name in ("pid", "log", "seed")),
        ]

    def _daemon(self, node: Node, *argv: str) -> None:
        env = {**node.env, "SLURM_CONF": str(self.root / "slurm.conf")}
        with (self.root / f"{argv[0]}.{node.name}.log").open("ab") as log:
            self.nodes.daemons.append(
                subprocess.Popen(
                    node.command(argv), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env
                )
            )


@contextmanager
def slurm_cluster(root: Path, count: int, cpus: int = 8) -> Iterator[SlurmCluster]:
    """So many compute nodes and a login node, ready for jobs; `root` is a folder that all of them see."""
    with nodes(count + 1) as machines, TemporaryDirectory(prefix="mg-") as disk:
        cluster = SlurmCluster(machines, root, Path(disk))
        _write_files(cluster, cpus)
        for node in machines.nodes:
            cluster.start(node)
        cluster.wait_for_nodes()
        yield cluster
        cluster.clear()


def _write_files(cluster: SlurmCluster, cpus: int) -> None:
    root, login = cluster.root, cluster.login
    (root / "state").mkdir()
    (root / "munge.key").write_bytes(secrets.token_bytes(64))
    (root / "munge.key").chmod(0o400)
    (root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    (root / "gres.conf").write_text(f"Name=gpu File=/dev/tty[0-{GPUS - 1}]\n")
    hosts = [f"{node.address} {node.name}" for node in cluster.nodes.nodes]
    (root / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
    lines = [
        f"NodeName={node.name} NodeAddr={node.address} CPUs={cpus} RealMemory=64000 Gres=gpu:{GPUS} State=UNKNOWN"
        for node in cluster.compute
    ]
    for node in cluster.compute:
        (root / f"spool.{node.name}").mkdir()
    config = CONFIG.format(
        root=root, login=login.name, address=login.address, nodes="\n".join(lines), partition=PARTITION
    )
    (root / "slurm.conf").write_text(config)
