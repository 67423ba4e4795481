"""Waiting for remote work: always with a deadline, and with an error that says what, who and where.

The driver waits nowhere else. Time spent here is not the driver's own (perf/driver_s).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from megarl.cluster.checks import BrokenLinkError, check_links, describe_links, describe_lost
from megarl.cluster.nodes import Nodes
from megarl.cluster.process import STACK_SIGNAL, ProcessFacts, ProcessSpec, tail
from megarl.core.errors import DeadlineError, MegarlError, UserError, WorkerDiedError
from megarl.core.progress import read_progress
from megarl.core.timing import PhaseTimer

T = TypeVar("T")
U = TypeVar("U")

STACK_WAIT_S = 2.0
LINKS_EVERY_S = 10.0  # between two looks at the network while waiting
PROGRESS_EVERY_S = 1.0  # between two looks at how far an operation is
WATCH_WAIT_S = 2.0  # how much later than its callers a supervisor may notice that its process has ended


@dataclass(frozen=True)
class Worker:
    """One remote process: its Ray actor, and what an error needs to say of it."""

    handle: Any
    spec: ProcessSpec
    facts: ProcessFacts

    @property
    def name(self) -> str:
        """For people."""
        return self.spec.name


@dataclass(frozen=True)
class Call:
    """One call under way: `result` is small and is fetched; what is big travels in references beside it."""

    worker: Worker
    result: Any


@dataclass(frozen=True)
class Pending(Generic[T]):
    """Calls under way, of one operation of a role. finish: makes of their results what the operation gives."""

    waiter: Waiter
    calls: Sequence[Call]
    phase: str
    role: str
    deadline_s: float
    finish: Callable[[list[Any]], T]

    def wait(self) -> T:
        """What the operation gives, once every call has ended. Raises what `Waiter.wait` raises."""
        return self.finish(self.waiter.wait(self.calls, phase=self.phase, role=self.role, deadline_s=self.deadline_s))

    def then(self, finish: Callable[[T], U]) -> Pending[U]:
        """The same calls, which give something else."""
        return Pending(
            self.waiter,
            self.calls,
            self.phase,
            self.role,
            self.deadline_s,
            lambda results: finish(self.finish(results)),
        )


@dataclass
class Waiter:
    """Waits for calls; also notices watched processes that end meanwhile, and links between nodes that break.

    watches: reference that becomes ready when a watched process ends -> what to do then (may raise).
    """

    timer: PhaseTimer
    nodes: Nodes = field(default_factory=Nodes)
    watches: dict[Any, Callable[[str], None]] = field(default_factory=dict)

    def wait(self, calls: Sequence[Call], *, phase: str, role: str, deadline_s: float) -> list[Any]:
        """Results in the order of the calls.

        Raises WorkerDiedError, DeadlineError, BrokenLinkError, or the call's own MegarlError with the worker's name in
        front. The first failure is raised at once, whatever the other calls still do; where the network explains it, it
        comes first.
        """
        with self.timer.waiting():
            try:
                return self._wait(calls, phase, role, deadline_s)
            except (UserError, BrokenLinkError):
                raise
            except MegarlError as error:
                if network := self._network():
                    raise type(error)(f"{network}\n{error}") from error
                raise

    def _wait(self, calls: Sequence[Call], phase: str, role: str, deadline_s: float) -> list[Any]:
        by_ref = {call.result: call for call in calls}
        results: dict[Any, Any] = {}
        now = time.monotonic()
        end, look = now + deadline_s, now + LINKS_EVERY_S
        while len(results) < len(by_ref):
            pending = [ref for ref in by_ref if ref not in results]
            pause_s = PROGRESS_EVERY_S if self.timer.on_progress else LINKS_EVERY_S
            timeout_s = max(0.0, min(end, look, time.monotonic() + pause_s) - time.monotonic())
            ready, _ = ray.wait([*pending, *self.watches], num_returns=1, timeout=timeout_s)
            if time.monotonic() > end and not ready:
                raise self._deadline(phase, role, deadline_s, [by_ref[ref].worker for ref in pending])
            if time.monotonic() > look:
                # Whoever waits for a peer that cannot be reached may do so for hours, and knows no reason.
                check_links(self.nodes.broken_for_certain())
                look = time.monotonic() + LINKS_EVERY_S
            if not ready:
                self._show_progress(by_ref[pending[0]].worker)
            for ref in ready:
                if ref in by_ref:
                    results[ref] = self._fetched(by_ref[ref], phase, role)
                else:
                    self._watched(ref)
        return [results[call.result] for call in calls]

    def _show_progress(self, worker: Worker) -> None:
        done = read_progress(worker.spec.progress) if self.timer.on_progress else None
        if self.timer.on_progress and done is not None:
            self.timer.on_progress(done)

    def _fetched(self, call: Call, phase: str, role: str) -> Any:
        try:
            return _fetch(call, phase, role)
        except MegarlError:
            # Where a watched process has ended, its end is the cause, and what its callers saw is not.
            ended, _ = ray.wait(list(self.watches), timeout=WATCH_WAIT_S) if self.watches else ([], [])
            for ref in ended:
                self._watched(ref)
            raise

    def _watched(self, ref: Any) -> None:
        ended = self.watches.pop(ref)
        try:
            ended(str(ray.get(ref, timeout=0)))
        except (RayActorError, RayTaskError, GetTimeoutError) as error:
            ended(f"its supervisor ended: {type(error).__name__}")

    def _network(self) -> str:
        """What is wrong with nodes and links, if anything is."""
        lost, broken = self.nodes.lost(), self.nodes.broken()
        return "\n".join([*([describe_lost(lost)] if lost else []), *([describe_links(broken)] if broken else [])])

    def _deadline(self, phase: str, role: str, deadline_s: float, workers: list[Worker]) -> DeadlineError:
        names = ", ".join(worker.name for worker in workers)
        far = [(worker.name, read_progress(worker.spec.progress)) for worker in workers]
        reached = "".join(f" {name} had done {done}." for name, done in far if done is not None)
        stacks = [f"--- {worker.name}, stacks:\n{stacks_of(worker, self.nodes)}" for worker in workers]
        logs = [f"--- {worker.name}, end of {worker.spec.log}:\n{tail(worker.spec.log)}" for worker in workers]
        return DeadlineError(
            f"{phase} ({role}) did not finish within {deadline_s:g} s. Still waiting for: {names}.{reached} If this work is only "
            "slow, raise its limit under `deadlines` in the recipe.\n" + "\n".join([*stacks, *logs])
        )


def stacks_of(worker: Worker, nodes: Nodes) -> str:
    """All stacks of a process, on whatever node it is, as its own fault handler writes them."""
    before = worker.spec.stack.stat().st_size if worker.spec.stack.exists() else 0
    if trouble := nodes.signal(worker.facts.address, worker.facts.pid, STACK_SIGNAL):
        return f"({trouble})"
    end = time.monotonic() + STACK_WAIT_S
    size = before
    while time.monotonic() < end:
        # The handler writes in several pieces: the dump is whole once it stopped growing.
        time.sleep(0.1)
        grown = worker.spec.stack.stat().st_size
        if grown == size and grown > before:
            break
        size = grown
    return tail(worker.spec.stack, 60)


def _fetch(call: Call, phase: str, role: str) -> Any:
    worker = call.worker
    try:
        return ray.get(call.result)
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BaseException) else error
        if isinstance(cause, MegarlError):
            raise type(cause)(f"{phase} ({role}), {worker.name}: {cause}") from None
        raise MegarlError(
            f"{phase} ({role}) failed on {worker.name}: {type(cause).__name__}: {cause}\n--- its trace:\n{error}"
            f"\n--- end of {worker.spec.log}:\n{tail(worker.spec.log)}"
        ) from error
    except RayActorError as error:
        raise WorkerDiedError(
            f"{worker.name} (pid {worker.facts.pid} on {worker.facts.host}) died during {phase} ({role}). "
            f"{_reason(error)}\n--- end of {worker.spec.log}:\n{tail(worker.spec.log)}"
        ) from error


def _reason(error: RayActorError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "worker" in line.lower() or "died" in line.lower()]
    return " ".join(lines[-2:])
