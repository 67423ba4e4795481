"""Waiting for remote work: always with a deadline, and with an error that says what, who and where.

The driver waits nowhere else. Time spent here is not the driver's own (perf/driver_s).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from megarl.cluster.checks import BrokenLinkError, check_links, describe_links, describe_lost
from megarl.cluster.deaths import Deaths
from megarl.cluster.look import collectives_of, stacks_of
from megarl.cluster.nodes import Nodes
from megarl.cluster.process import UNKNOWN, ProcessFacts, ProcessSpec
from megarl.cluster.services import RayDiedError
from megarl.core.errors import DeadlineError, MegarlError, UserError, WorkerDiedError
from megarl.core.log import get_logger
from megarl.core.log_tail import own_words
from megarl.core.out_of_memory import OutOfMemory, device_memory_advice
from megarl.core.progress import read_progress
from megarl.core.timing import PhaseTimer

T = TypeVar("T")
U = TypeVar("U")

log = get_logger(__name__)

LOOK_EVERY_S = 0.5  # between two looks at Ray's own processes, and at how far an operation is, while waiting
LINKS_EVERY_S = 10.0  # between two looks at the network while waiting
WATCH_WAIT_S = 2.0  # how much later than its callers a supervisor may notice that its process has ended


@dataclass(frozen=True)
class Worker:
    """One remote process: its Ray actor, and what an error needs to say of it."""

    handle: Any
    spec: ProcessSpec
    facts: ProcessFacts = UNKNOWN

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

    def poll(self) -> T | None:
        """What the operation gives, where every call has ended; None while one goes on. Raises what `wait` raises."""
        results = [call.result for call in self.calls]
        ended, _ = ray.wait(results, num_returns=len(results), timeout=0)
        return self.wait() if len(ended) == len(results) else None

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
class Following:
    """Calls that nobody waits for. patient: all are to end, also where one fails. left: those that have not ended."""

    calls: Sequence[Call]
    then: Callable[[list[Any], str], None]
    patient: bool
    left: set[Any]
    failure: str = ""


@dataclass
class Waiter:
    """Waits for calls; also notices watched processes that end meanwhile, and links between nodes that break.

    watches: reference that becomes ready when a watched process ends -> what to do then (may raise).
    notices: reference to a line for people that a process will have -> what shows it.
    followed: reference of a call that nobody waits for -> what it belongs to.
    """

    timer: PhaseTimer
    nodes: Nodes = field(default_factory=Nodes)
    watches: dict[Any, Callable[[str], None]] = field(default_factory=dict)
    notices: dict[Any, Callable[[str], None]] = field(default_factory=dict)
    followed: dict[Any, Following] = field(default_factory=dict)
    memory: OutOfMemory = field(default_factory=OutOfMemory)
    deaths: Deaths = field(init=False)

    def __post_init__(self) -> None:
        self.deaths = Deaths(self.nodes)

    def wait(self, calls: Sequence[Call], *, phase: str, role: str, deadline_s: float) -> list[Any]:
        """Results in the order of the calls.

        Raises WorkerDiedError, DeadlineError, BrokenLinkError, or the call's own MegarlError with the worker's name in
        front. The first failure is raised at once, whatever the other calls still do; where the network explains it, it
        comes first, and so does what else explains it: Ray itself, or a process that somebody has stopped.
        """
        with self.timer.waiting():
            try:
                return self._wait(calls, phase, role, deadline_s)
            except (UserError, BrokenLinkError, RayDiedError):
                raise
            except MegarlError as error:
                self._check_ray()
                if reasons := self.circumstances():
                    raise type(error)(f"{reasons}\n{error}") from error
                raise

    def follow(self, calls: Sequence[Call], then: Callable[[list[Any], str], None], *, patient: bool = False) -> None:
        """Wait for nothing: once all calls have ended, whoever waits for something else goes on with `then` (may raise).

        then: gets their results in order, or none of them and how the first that failed did so; at once, where not patient.
        """
        following = Following(calls, then, patient, {call.result for call in calls})
        self.followed |= dict.fromkeys(following.left, following)

    def until(self, done: Callable[[], bool], what: str, deadline_s: float) -> None:
        """Wait until what is watched and followed has brought it about. Raises DeadlineError, and what these raise."""
        end = time.monotonic() + deadline_s
        with self.timer.waiting():
            while not done():
                if time.monotonic() > end or not (self.watches or self.followed):
                    raise DeadlineError(f"{what} did not come about within {deadline_s:g} s.\n{self.circumstances()}")
                for ref in self._look([], LOOK_EVERY_S):
                    self._happened(ref)

    def _look(self, pending: Sequence[Any], timeout_s: float) -> list[Any]:
        """What is ready first, of all that somebody waits for, watches or follows; nothing where the time is over."""
        # A call may be waited for and followed at once; Ray takes each reference once.
        everything = list(dict.fromkeys([*pending, *self.watches, *self.notices, *self.followed]))
        ready, _ = ray.wait(everything, num_returns=1, timeout=timeout_s)
        self._check_ray()
        return list(ready)

    def _happened(self, ref: Any) -> None:
        """Something that nobody waits for."""
        if ref in self.notices:
            self._noticed(ref)
        elif ref in self.followed:
            self._followed(ref)
        else:
            self._watched(ref)

    def _wait(self, calls: Sequence[Call], phase: str, role: str, deadline_s: float) -> list[Any]:
        by_ref = {call.result: call for call in calls}
        results: dict[Any, Any] = {}
        now = time.monotonic()
        end, look = now + deadline_s, now + LINKS_EVERY_S
        while len(results) < len(by_ref):
            pending = [ref for ref in by_ref if ref not in results]
            for ref in pending:
                self.deaths.watch(by_ref[ref].worker.facts)
            timeout_s = max(0.0, min(end - time.monotonic(), look - time.monotonic(), LOOK_EVERY_S))
            ready = self._look(pending, timeout_s)
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
                    others = [by_ref[each] for each in pending if each != ref]
                    results[ref] = self._fetched(by_ref[ref], others, phase, role)
                else:
                    self._happened(ref)
        return [results[call.result] for call in calls]

    def _show_progress(self, worker: Worker) -> None:
        done = read_progress(worker.spec.progress) if self.timer.on_progress else None
        if self.timer.on_progress and done is not None:
            self.timer.on_progress(done)

    def _fetched(self, call: Call, others: Sequence[Call], phase: str, role: str) -> Any:
        try:
            return self._fetch(call, phase, role)
        except MegarlError as error:
            # Where a watched process has ended, its end is the cause, and what its callers saw is not.
            if self.watches and ray.wait(list(self.watches), timeout=WATCH_WAIT_S)[0]:
                watched = list(self.watches)
                for ref in ray.wait(watched, num_returns=len(watched), timeout=0)[0]:
                    self._watched(ref)
            if type(error) is MegarlError and (death := self._death(others, phase, role)) is not None:
                raise death from error  # who has lost a peer says that its connection was closed, or worse
            raise

    def _fetch(self, call: Call, phase: str, role: str) -> Any:
        worker = call.worker
        try:
            return ray.get(call.result)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            if isinstance(cause, MegarlError):
                raise type(cause)(f"{phase} ({role}), {worker.name}: {cause}") from None
            raise MegarlError(
                f"{phase} ({role}) failed on {worker.name}: {type(cause).__name__}: {cause}\n"
                f"{device_memory_advice(cause)}--- its trace:\n{error}"
                f"\n--- end of {worker.spec.log}:\n{own_words(worker.spec.log)}"
            ) from error
        except RayActorError as error:
            raise WorkerDiedError(
                f"{worker.name} (pid {worker.facts.pid} on {worker.facts.host}) died during {phase} ({role}). "
                f"{self.deaths.why(worker.facts, error)}\n--- end of {worker.spec.log}:\n{own_words(worker.spec.log)}"
            ) from error
        except RayError as error:
            raise WorkerDiedError(
                f"{phase} ({role}): what {worker.name} gave is lost. {type(error).__name__}: {error}"
            ) from error

    def _death(self, calls: Sequence[Call], phase: str, role: str) -> WorkerDiedError | None:
        """The death of a worker that one of these calls ends with, now or a moment later; None where none does."""
        end, left = time.monotonic() + WATCH_WAIT_S, {call.result: call for call in calls}
        while left:
            ended, _ = ray.wait(list(left), num_returns=1, timeout=max(0.0, end - time.monotonic()))
            if not ended:
                return None
            try:
                self._fetch(left.pop(ended[0]), phase, role)
            except WorkerDiedError as error:
                return error
            except MegarlError:
                continue  # another one that has lost it
        return None

    def _watched(self, ref: Any) -> None:
        ended = self.watches.pop(ref)
        try:
            ended(str(ray.get(ref, timeout=0)))
        except (RayActorError, RayTaskError, GetTimeoutError) as error:
            ended(f"its supervisor ended: {type(error).__name__}")

    def _followed(self, ref: Any) -> None:
        following = self.followed.pop(ref)
        following.left.discard(ref)
        try:
            ray.get(ref, timeout=0)
        except RayTaskError as error:
            following.failure = following.failure or str(error.cause or error)
        except RayError as error:
            following.failure = following.failure or f"its supervisor ended: {type(error).__name__}"
        if following.failure and not following.patient:
            for other in following.left:
                del self.followed[other]
            following.left.clear()
        if not following.left:
            failed = bool(following.failure)
            results = [] if failed else [ray.get(call.result, timeout=0) for call in following.calls]
            following.then(results, following.failure)

    def _check_ray(self) -> None:
        """Raises RayDiedError where Ray's own processes have ended: every other sign comes of that."""
        if ended := self.nodes.services.ended():
            log.error("%s", ended)  # now: taking a run without Ray apart lasts several seconds
            raise RayDiedError(ended)

    def circumstances(self) -> str:
        """What is wrong with nodes, links and processes, and may be why something else is; empty where nothing is."""
        lost, broken, stopped = self.nodes.lost(), self.nodes.broken(), self.nodes.stopped()
        lines = [*([describe_lost(lost)] if lost else []), *([describe_links(broken)] if broken else [])]
        lines += [told] if (told := self.memory.told()) else []
        if stopped:
            lines.append(
                f"Stopped, and let go on by kill -CONT and the pid: {', '.join(stopped)}. Whatever waits for them waits "
                "in vain."
            )
        return "\n".join(lines)

    def _noticed(self, ref: Any) -> None:
        show = self.notices.pop(ref)
        try:
            line = str(ray.get(ref, timeout=0))
        except (RayActorError, RayTaskError, GetTimeoutError):
            return  # whoever waits for that process is told of its end
        show(line)

    def _deadline(self, phase: str, role: str, deadline_s: float, workers: list[Worker]) -> DeadlineError:
        names = ", ".join(worker.name for worker in workers)
        far = [(worker.name, read_progress(worker.spec.progress)) for worker in workers]
        reached = "".join(f" {name} had done {done}." for name, done in far if done is not None)
        stacks = [
            f"--- {worker.name}, stacks:\n{stacks_of(worker.spec, worker.facts, self.nodes)}" for worker in workers
        ]
        last = [(worker.name, collectives_of(worker.spec, worker.facts, self.nodes)) for worker in workers]
        stacks += [f"--- {name}, its last collectives:\n{lines}" for name, lines in last if lines]
        logs = [f"--- {worker.name}, end of {worker.spec.log}:\n{own_words(worker.spec.log)}" for worker in workers]
        return DeadlineError(
            f"{phase} ({role}) did not finish within {deadline_s:g} s. Still waiting for: {names}.{reached} If this work is only "
            "slow, raise its limit under `deadlines` in the recipe.\n" + "\n".join([*stacks, *logs])
        )
