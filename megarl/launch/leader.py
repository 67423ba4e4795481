"""The leader of a SLURM job, on the job's first node: Ray on every node, then the driver, then what becomes of the job.

Run by launch/slurm.sbatch inside of an allocation. It ends with the driver's exit code; where the driver stopped on
request before the time limit, or because a node was lost, it has SLURM queue the job again, and the driver resumes.

Knows nothing of recipes: the driver is the command that follows `--`. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Literal

from megarl.core.end_signals import heeded
from megarl.core.errors import DeadlineError, MegarlError, StoppedError
from megarl.core.ports import kept_port
from megarl.core.ray_env import AGAIN_VARIABLE, FEW_EVENTS, HEALTH_CHECKS, RAY_ADDRESS_VARIABLE, RAY_NODES_VARIABLE
from megarl.core.stop import STOP_SIGNAL, held_back
from megarl.launch.node import own_address
from megarl.launch.progress import MOST_VAIN, reached, vain_starts
from megarl.launch.words import ALIVE_EVERY_S, Message, parse_line
from megarl.serving.process import GUARD

SILENT_S = 5 * ALIVE_EVERY_S  # a node that says nothing for so long is lost
# One process a node has all of the job's CPUs there: some SLURMs would bind it to one (TaskPluginParam=autobind).
STEP = ("--overlap", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "--cpu-bind=none")
# Nodes have the leader's environment, Ray's secret in it, also in a job that was submitted without any (--export=NONE).
SRUN = ("srun", "--export=ALL", *STEP)
# srun's variables for what tasks read and print, as a user's profile may set them: nodes are heard by their lines alone.
OF_LINES = ("SLURM_LABELIO", "SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE")
CLOSE_S = 20.0  # longest orderly end of the nodes
# Who its guard is told of (serving/guarded.py): a request to stop that comes early is held back for the driver.
LEADER_VARIABLE = "MEGARL_LEADER_PID"
REQUEUE_S = 60.0  # longest wait for SLURM to queue a job again, and then to end it

Source = Literal["node", "nodes ended", "driver ended", "signal"]
Event = tuple[Source, int, Message | None]


@dataclass(frozen=True)
class Allocation:
    """What SLURM gave: job id, nodes in SLURM's order, how often the job was queued again."""

    job: str
    nodes: tuple[str, ...]
    restart: int
    cpus: str

    @classmethod
    def current(cls) -> Allocation:
        """The allocation that this process runs in."""
        names = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
        nodes = subprocess.run(names, capture_output=True, text=True, check=True).stdout.split()
        restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        return cls(os.environ["SLURM_JOB_ID"], tuple(nodes), restart, os.environ.get("SLURM_CPUS_PER_TASK", ""))

    @property
    def name(self) -> str:
        """Differs from that of every other job, and of every other start of this one."""
        return f"{self.job}-{self.restart}"


@dataclass(frozen=True)
class Plan:
    """What to run and how.

    temp: folder on every node's own disk. resources: `name=count` of each node, beside GPUs. events: file for what
    happened when. metrics: the run's metrics.jsonl. start_s: longest wait for all nodes.
    """

    driver: tuple[str, ...]
    temp: Path
    resources: tuple[str, ...]
    events: Path
    metrics: Path
    start_s: float


class Nodes:
    """Ray on every node of the allocation: one `srun`, whose standard output says how far each node is."""

    def __init__(self, allocation: Allocation, plan: Plan, head: str, events: queue.SimpleQueue[Event]) -> None:
        self.names = allocation.nodes
        self.said: dict[str, Message] = {}
        self.heard: dict[str, float] = {}
        self._node = [sys.executable, "-m", "megarl.launch.node", "--head", head, "--run-id", f"job-{allocation.name}"]
        self._node += ["--temp", str(plan.temp / f"megarl-{allocation.name}"), "--deadline", str(plan.start_s)]
        for resource in plan.resources:
            self._node += ["--resource", resource]
        cpus = [f"--cpus-per-task={allocation.cpus}"] if allocation.cpus else []
        everywhere = [*SRUN, f"--nodes={len(self.names)}", f"--ntasks={len(self.names)}", "--ntasks-per-node=1", *cpus]
        self._srun = subprocess.Popen(
            [*everywhere, *self._node],
            env={name: value for name, value in os.environ.items() if name not in OF_LINES},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        assert self._srun.stdout is not None
        threading.Thread(target=self._listen, args=(self._srun.stdout, events), daemon=True).start()

    def _listen(self, lines: IO[str], events: queue.SimpleQueue[Event]) -> None:
        for line in lines:
            message = parse_line(line)
            if message is None:
                with suppress(OSError):  # the job's log may be on a disk that is full: nodes are heard all the same
                    print(line, end="", file=sys.stderr, flush=True)
            else:
                events.put(("node", 0, message))
        events.put(("nodes ended", self._srun.wait(), None))

    def hear(self, message: Message) -> None:
        """Remember what a node said, and when."""
        self.heard[message.node] = time.monotonic()
        if message.word != "alive":
            self.said[message.node] = message

    def missing(self) -> list[str]:
        """Nodes whose Ray does not run yet, each with how far it is."""
        return [self._state(name) for name in self.names if name not in self.said or self.said[name].word != "ready"]

    def _state(self, name: str) -> str:
        if name not in self.said:
            return f"{name} (nothing was heard of it)"
        return f"{name} ({self.said[name].address}: reached, but Ray is not up)"

    def close(self, lost: Sequence[str]) -> None:
        """End Ray on every node, in order; what does not end is killed. lost: nodes that cannot be reached."""
        assert self._srun.stdin is not None
        self._srun.stdin.close()
        try:
            self._srun.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._srun.kill()  # SLURM ends the rest with the job
            self._srun.wait()
        if self._srun.returncode:
            self._sweep([name for name in self.said if name not in lost])

    def _sweep(self, names: Sequence[str]) -> None:
        """Where SLURM has killed the nodes' processes, they had no time to remove their folders."""
        each = [*SRUN, "--nodes=1", "--ntasks=1"]
        steps = [subprocess.Popen([*each, f"--nodelist={name}", *self._node, "--sweep"]) for name in names]
        end = time.monotonic() + CLOSE_S
        for step in steps:
            try:
                step.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                step.kill()


def reached_address(peer: str) -> str:
    """This node's address on the network of another. Raises MegarlError where its name is unknown here."""
    try:
        return own_address(peer)
    except OSError as error:
        raise MegarlError(f"The job's first node does not know the address of {peer}: {error}.") from error


class Leader:
    """One start of a job."""

    def __init__(self, allocation: Allocation, plan: Plan) -> None:
        self._allocation = allocation
        self._plan = plan
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        peers = allocation.nodes[1:]
        self._address = reached_address(peers[0]) if peers else "127.0.0.1"
        self._port = kept_port(self._address)  # until Ray's head listens there
        self._head = f"{self._address}:{self._port.getsockname()[1]}"
        self._ended = False  # SLURM has asked for the end of the job

    def run(self) -> int:
        """Returns the job's exit code."""
        for number in (STOP_SIGNAL, *heeded()):
            signal.signal(number, self._signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {STOP_SIGNAL})  # the job's script holds it back until now
        # A secret of this start, which every process inherits: it is on no command line and in no file.
        os.environ.pop("RAY_ADDRESS", None)  # of another Ray
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)} | HEALTH_CHECKS | FEW_EVENTS
        self._begin()
        nodes = Nodes(self._allocation, self._plan, self._head, self._events)
        lost: list[str] = []
        try:
            self._await_nodes(nodes)
            self._port.close()
            self._note("nodes ready")
            code = self._drive(nodes)
            if code not in (0, StoppedError.exit_code) and not self._ended:
                lost = self._lost(nodes)
        except StoppedError:
            code = StoppedError.exit_code
        finally:
            nodes.close(lost)
            self._note("nodes ended")
        if lost:
            print(f"megarl: lost {', '.join(lost)}: SLURM queues the job again", file=sys.stderr, flush=True)
        if lost or code == StoppedError.exit_code:
            self._requeue(len(lost))
        return code

    def _begin(self) -> None:
        """Note the start. Raises MegarlError where those before it came to nothing too often."""
        job, events, step = self._allocation.job, self._plan.events, reached(self._plan.metrics)
        vain = vain_starts(events, job, step)
        self._write("started", reached=step)  # or a job whose nodes are bad would be queued again without end
        if vain >= MOST_VAIN:
            raise MegarlError(
                f"Job {job} was started {vain} times without a further step after step {step}. Each start lost nodes, or SLURM "
                "ended it, as it does for jobs of a higher priority: it is not queued again. When which start ended is in "
                f"{events}; why is above. Leave bad nodes out (--exclude), or save more often (train.save_every), and submit "
                "the run with --resume."
            )

    def _signal(self, number: int, frame: FrameType | None) -> None:
        self._events.put(("signal", number, None))

    def _await_nodes(self, nodes: Nodes) -> None:
        """Until Ray runs on every node. Raises MegarlError that names those where it does not."""
        end = time.monotonic() + self._plan.start_s
        while nodes.missing():
            try:
                source, number, message = self._events.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise DeadlineError(
                    f"{len(nodes.missing())} of the {len(nodes.names)} nodes of job {self._allocation.job} were not ready "
                    f"within {self._plan.start_s:g} s: {', '.join(nodes.missing())}. Exclude them with "
                    "--exclude, or raise --start-deadline if they only need longer."
                ) from None
            if message is not None and message.word == "failed":
                raise MegarlError(f"{message.node} ({message.address}) cannot be part of the job; why, is said above.")
            if message is not None:
                nodes.hear(message)
            elif source == "nodes ended":
                raise MegarlError(
                    f"srun ended (exit code {number}) before Ray ran on {', '.join(nodes.missing())}. What it said is "
                    "above."
                )
            elif number == STOP_SIGNAL:
                raise StoppedError("stopped before the nodes were ready")
            else:
                raise MegarlError("the job was ended before its nodes were ready")

    def _drive(self, nodes: Nodes) -> int:
        """Run the driver to its end; returns its exit code as a shell says it."""
        environment = {**os.environ, RAY_ADDRESS_VARIABLE: self._head, RAY_NODES_VARIABLE: str(len(nodes.names))}
        environment |= {AGAIN_VARIABLE: "1"} if self._allocation.restart else {}
        environment[LEADER_VARIABLE] = str(os.getpid())
        command = [sys.executable, "-I", "-S", str(GUARD), LEADER_VARIABLE, *self._plan.driver]
        with held_back():
            driver = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        threading.Thread(target=lambda: self._events.put(("driver ended", driver.wait(), None)), daemon=True).start()
        while True:
            source, number, message = self._events.get()
            if message is not None:
                nodes.hear(message)
            elif source == "driver ended":
                code = number if number >= 0 else 128 - number
                self._note("driver ended", exit_code=code)
                return code
            elif source == "signal":
                self._ended = self._ended or number != STOP_SIGNAL
                driver.send_signal(number)
            elif not self._ended:
                print(f"megarl: srun ended (exit code {number}) while the driver runs", file=sys.stderr, flush=True)

    def _lost(self, nodes: Nodes) -> list[str]:
        """Nodes of which nothing has been heard since the driver ended."""
        silent, end = set(nodes.names), time.monotonic() + SILENT_S
        while silent and time.monotonic() < end:
            try:
                source, number, message = self._events.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                break
            if message is not None and message.word != "failed":
                silent.discard(message.node)
            elif (
                source == "signal" and number != STOP_SIGNAL
            ):  # a job that is to stop soon may be queued again all the same
                return []
        return sorted(silent)

    def _requeue(self, lost: int) -> None:
        """Have SLURM queue the job again, which ends this process. lost: nodes."""
        self._note("requeued", lost=lost)
        if refusal := requeue(self._allocation.job):
            print(
                f"megarl: SLURM does not queue the job again ({refusal}). Go on with it by submitting it with --resume.",
                file=sys.stderr,
                flush=True,
            )
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.sigtimedwait([], REQUEUE_S)

    def _note(self, event: str, **more: int) -> None:
        """Write down what happened; a disk that is full, as it may be why the run ended, ends no job that goes on."""
        try:
            self._write(event, **more)
        except MegarlError as error:
            with suppress(OSError):
                print(f"megarl: {error}", file=sys.stderr, flush=True)

    def _write(self, event: str, **more: int) -> None:
        """Raises MegarlError where it cannot be written."""
        place = {"job": self._allocation.job, "restart": self._allocation.restart}
        line = {**place, "event": event, "time": time.time(), **more}
        try:
            with self._plan.events.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise MegarlError(
                f"'{event}' of job {self._allocation.job} could not be written to {self._plan.events}: "
                f"{error.strerror or error}."
            ) from error


def requeue(job: str, longest_s: float = REQUEUE_S) -> str:
    """Ask SLURM to queue a job again. Why it does not, in its own words; empty where it does."""
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=longest_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"scontrol has not answered for {longest_s:g} s"
    # SLURM itself may have been faster, where it was the first to notice that a node is gone.
    if not done.returncode or "pending" in done.stderr:
        return ""
    return done.stderr.strip() or f"scontrol ended with {done.returncode}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--temp", type=Path, default=Path("/tmp"), help="folder on every node's own disk")
    parser.add_argument("--resource", action="append", default=[], help="name=count of each node, beside GPUs")
    parser.add_argument("--events", type=Path, required=True, help="file for what happened when")
    parser.add_argument("--metrics", type=Path, required=True, help="the run's metrics.jsonl: how far it is")
    parser.add_argument("--start-deadline", type=float, default=300.0, help="seconds until all nodes have to be there")
    parser.add_argument("driver", nargs="+", help="after --: the command to run")
    options = parser.parse_args(arguments)
    files = (options.events, options.metrics)
    plan = Plan(tuple(options.driver), options.temp, tuple(options.resource), *files, options.start_deadline)
    try:
        return Leader(Allocation.current(), plan).run()
    except MegarlError as error:
        print(f"megarl: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
