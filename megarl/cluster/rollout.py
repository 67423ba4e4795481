"""The driver's handle of generation: samples (samples.py), and the server pool that their collectors ask."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from megarl.cluster.collector_pool import CollectorPool
from megarl.cluster.collectors import ProbeResult
from megarl.cluster.roles import Batch, ColumnRefs
from megarl.cluster.runtime import Runtime
from megarl.cluster.samples import LaunchingSamples, Learnable, Samples
from megarl.cluster.server_launch import LaunchingPool
from megarl.cluster.servers import MARGIN_S, ServerPool
from megarl.cluster.waits import Call, Pending, Waiter
from megarl.core.errors import SyncError
from megarl.core.log import get_logger
from megarl.core.pending import Finished
from megarl.core.protocols import Pending as AnyPending
from megarl.core.types import EvalResult
from megarl.recipe.roles import ServerPart
from megarl.recipe.schema import Recipe

log = get_logger(__name__)

# What servers can do without between answers. Their weights they cannot: nobody sends them again.
CACHE: tuple[ServerPart, ...] = ("kv_cache",)


class Overlapping:
    """An evaluation that goes on beside training. ask: begins one at a weight version. traffic: as of ServerPool."""

    def __init__(
        self,
        ask: Callable[[int], Pending[EvalResult]],
        weight_version: int,
        traffic: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._ask, self._traffic = ask, traffic
        self._asked = ask(weight_version)

    @property
    def ended(self) -> bool:
        """Whether its result is there."""
        return self.poll() is not None

    def restart(self, weight_version: int) -> None:
        """Begin anew at another version; nobody hears of what was asked before."""
        self._asked = self._ask(weight_version)

    def poll(self) -> EvalResult | None:
        """The result, once it is there."""
        return self._asked.poll()

    def wait(self) -> EvalResult:
        """The result. While the ranks have its weights still: whoever comes in a server's place gets them."""
        with self._traffic():
            return self._asked.wait()


@dataclass
class Behind:
    """What a run that goes on has not needed yet, while it makes steps again that its journal has.

    known: evaluations that were made before, by step. version: of the weights that servers were not sent. then: asks the
    servers in the step that is being made. over: servers are needed with the next weights. syncs, evaluations: left out.
    """

    known: Mapping[int, EvalResult]
    version: int | None = None
    then: Callable[[], None] | None = None
    over: bool = False
    syncs: int = 0
    evaluations: int = 0


@dataclass
class RolloutPool:
    """Generation, as the loop sees it. beside: the servers go on while the ranks train. pay: sends weights of a version."""

    samples: Samples
    servers: ServerPool
    recipe: Recipe
    beside: bool
    pay: Callable[[int], object] | None = None
    _behind: Behind | None = None
    _evaluating: Overlapping | None = None
    _paused: bool = False  # whether its servers are

    @property
    def collectors(self) -> CollectorPool:
        """Who asks the servers."""
        return self.samples.collectors

    def next(self, step: int, weight_version: int) -> Batch:
        """One step's samples, made while the last one trained where `beside`; the servers sleep until weights come else.

        A collector that dies is replaced, and the step made of what is left and what is made anew.
        """
        with ExitStack() as asking:
            if self._behind is None:
                self._ask_servers(asking)
            else:
                self._behind.then = lambda: self._ask_servers(asking)
            batch = self.samples.next(step, weight_version)
            if self._behind is not None:
                self._behind.then = None
            elif not self.beside and batch.info.metrics["rollout/groups_running"]:
                self._cut(self.recipe.deadlines.rollout_s)
        return batch

    def _ask_servers(self, asking: ExitStack) -> None:
        asking.enter_context(self._serving(then_sleep=self.recipe.rollout.offload))
        asking.enter_context(self.servers.traffic())

    def catch_up(self, known: Mapping[int, EvalResult]) -> None:
        """Steps that were made before the run was stopped are made again without servers: weights wait until one is needed.

        known: evaluations that were made then, by step. To be called before the first weights are sent.
        """
        coordinator, deadline_s = self.samples.coordinator, self.recipe.deadlines.start_s
        if not self.samples.wait(coordinator.handle.repeating.remote(), "data", deadline_s):
            return
        # What is not in the journal waits for servers that have the weights of its step.
        self.samples.wait(coordinator.handle.hold.remote(), "data", deadline_s)
        self._behind = Behind(known)
        behind = Call(coordinator, coordinator.handle.behind.remote())
        self.samples.waiter.follow([behind], lambda _, failure: None if failure else self._needed())

    def owes(self, weight_version: int) -> bool:
        """Whether nobody needs these weights yet: they are sent, or those that come after them, once somebody does."""
        if self._behind is None or self._behind.over:
            self._behind = None
            return False
        self._behind.version = weight_version
        self._behind.syncs += 1
        return True

    def _needed(self) -> None:
        """Samples have to be asked for."""
        if self._behind is not None and self._behind.then is None:
            self._behind.over = True  # not for this step: the next weights are sent as ever
        elif self._behind is not None and self._behind.then is not None:
            ask = self._behind.then
            self._pay()
            ask()

    def _pay(self) -> None:
        """Send the weights that servers were not sent yet."""
        behind, self._behind = self._behind, None
        if behind is not None and behind.version is not None and self.pay is not None:
            log.info(
                "steps before were made again from the journal, without %d weight syncs and %d evaluations; weight version %d is "
                "sent now",
                behind.syncs - 1,
                behind.evaluations,
                behind.version,
            )
            with self.samples.waiter.timer.phase("sync"):
                self.pay(behind.version)

    @contextmanager
    def _serving(self, then_sleep: Collection[ServerPart]) -> Iterator[None]:
        """Servers that answer. then_sleep: of what the recipe offloads, what nothing needs afterwards.

        Raises SyncError where their weights are offloaded: only a sync brings these back.
        """
        offloaded, deadline_s = self.recipe.rollout.offload, self.recipe.deadlines.sync_s
        self.servers.wake(CACHE, deadline_s)
        if self.servers.asleep:
            raise SyncError("The servers' weights are offloaded and were not sent again: a weight sync comes first.")
        yield
        self.servers.sleep(set(then_sleep).intersection(offloaded), deadline_s)

    def make_room(self) -> None:
        """Have the servers sleep before anybody was asked, as they do once a step's samples are there: weights wake them."""
        self.servers.sleep(self.recipe.rollout.offload, self.recipe.deadlines.sync_s)

    def advantages(self, batch: Batch, columns: dict[str, ColumnRefs]) -> Learnable:
        """What the updates learn from."""
        return self.samples.advantages(batch, columns)

    def evaluate(self, step: int, weight_version: int) -> AnyPending[EvalResult]:
        """Held-out answers, graded. Where the recipe says so, they come while training goes on, before the next weights."""
        handle, deadline_s = self.samples.coordinator.handle, self.recipe.deadlines.rollout_s
        if self._behind is not None and step in self._behind.known:
            self._behind.evaluations += 1
            return Finished(self._behind.known[step])
        self._pay()
        if self.recipe.eval.overlap and self.beside:
            self._evaluating = Overlapping(
                lambda version: self._evaluation(step, version), weight_version, self.servers.traffic
            )
            return self._evaluating
        with self._serving(then_sleep=CACHE), self.servers.traffic():
            result: EvalResult = self.samples.wait(handle.evaluate.remote(step, weight_version), "eval", deadline_s)
        return Finished(result)

    def _evaluation(self, step: int, weight_version: int) -> Pending[EvalResult]:
        call = Call(self.samples.coordinator, self.samples.coordinator.handle.evaluate.remote(step, weight_version))
        deadline_s = self.recipe.deadlines.rollout_s + MARGIN_S
        # So that its end is seen at once; `poll` has its result.
        self.samples.waiter.follow([call], lambda _, failure: None)
        return Pending(self.samples.waiter, [call], "eval", "rollout", deadline_s, lambda results: results[0])

    def _end_evaluation(self) -> None:
        """Wait for an evaluation that overlaps: it is of the weights that the servers still have.

        Where none of these is left, nobody has the weights any more: it is asked anew of those that come.
        """
        evaluating = self._evaluating
        if evaluating is not None:
            deadline_s = self.recipe.deadlines.rollout_s + MARGIN_S
            self.samples.waiter.until(lambda: evaluating.ended or not self.servers.servers, "An evaluation", deadline_s)
            if evaluating.ended:
                self._evaluating = None
            else:
                log.warning("no server is left of those that were evaluated: the evaluation is of the next weights")

    def pause(self) -> None:
        """Before new weights: nothing that runs at the servers is in their way, as rollout.in_flight says."""
        self._end_evaluation()
        mode, deadline_s = self.recipe.rollout.in_flight, self.recipe.deadlines.sync_s
        if not self.beside:
            return  # nothing runs between two steps
        if mode == "in_place":
            self._pause_servers(keep_kv=self.recipe.rollout.keep_kv)
        elif mode == "finish":
            self.samples.wait(self.samples.coordinator.handle.hold.remote(), "sync", deadline_s)
            self.samples.wait(self.samples.coordinator.handle.idle.remote(), "sync", self.recipe.deadlines.rollout_s)
        else:
            self._cut(deadline_s)

    @property
    def keeps_kv(self) -> bool:
        """Whether servers hold requests with the KV of the old weights while new ones come."""
        settings = self.recipe.rollout
        return self.beside and settings.in_flight == "in_place" and settings.keep_kv

    def still(self) -> None:
        """Have servers begin nothing while weights arrive, not even what tells whether they are well.

        SGLang ends where it is to forget what it computed with the old ones, and computes. Those that sleep are paused.
        """
        if not self._paused and not self.servers.asleep:
            self._pause_servers(keep_kv=False)

    def _pause_servers(self, *, keep_kv: bool) -> None:
        self._paused = True
        self.servers.pause(keep_kv=keep_kv, deadline_s=self.recipe.deadlines.sync_s)

    def arrived(self) -> None:
        """New weights have arrived: what was paused goes on."""
        if self._paused:
            self._paused = False
            self.servers.resume(self.recipe.deadlines.sync_s)

    def resume(self, weight_version: int) -> None:
        """New weights are verified: samples are asked for again."""
        release = self.samples.coordinator.handle.release.remote(weight_version)
        self.samples.wait(release, "sync", self.recipe.deadlines.sync_s)
        if self._evaluating is not None:
            self._evaluating.restart(weight_version)

    def probe(self) -> tuple[Any, Any]:
        """References to the plan and the block of sequences to verify a weight sync on."""
        prober = self.collectors.workers[0]
        done, plan, block = prober.handle.probe.options(num_returns=3).remote()
        self.samples.wait_all([Call(prober, done)], "sync", self.recipe.deadlines.sync_s)
        return plan, block

    def verify(self, trainer: Any, tolerance: float, version: int) -> float:
        """Compare all servers that have new weights with the trainer's column (a reference); the largest difference.

        Those that pass serve from now on; those that give no answer leave the pool. Raises SyncError.
        """
        deadline_s, prober = self.recipe.deadlines.sync_s, self.collectors.workers[0]
        with self._serving(then_sleep=CACHE):
            endpoints = [server.endpoint for server in self.servers.holding()]
            verify = prober.handle.verify.remote(endpoints, trainer, tolerance, version, deadline_s)
            [result] = self.samples.wait_all([Call(prober, verify)], "sync", deadline_s)
            found: ProbeResult = result
            for endpoint in endpoints:
                if endpoint.name in found.failed:
                    self.servers.drop(endpoint, found.failed[endpoint.name])
            self.servers.admit(version)
        return found.diff_max

    def state(self) -> dict[str, Any]:
        """The place in the data and what is under way, for a checkpoint."""
        return self.samples.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved place."""
        self.samples.load_state(state)

    def close(self) -> None:
        """End the servers and the router; the other processes end with the run. Raises LedgerError."""
        self.samples.close()
        self.servers.close()

    def _cut(self, deadline_s: float) -> None:
        """End what runs at the servers; what there is of it stays with the collectors, and goes on later."""
        endpoints = [server.endpoint for server in self.servers.servers]
        self.samples.wait(self.samples.coordinator.handle.cut.remote(endpoints), "sync", deadline_s)


@dataclass(frozen=True)
class LaunchingRollout:
    """Servers, collectors and their coordinator, starting."""

    samples: LaunchingSamples
    servers: LaunchingPool
    recipe: Recipe
    beside: bool

    @classmethod
    def launch(
        cls,
        runtime: Runtime,
        recipe: Recipe,
        servers: LaunchingPool,
        num_shards: int,
        waiter: Waiter,
        *,
        beside: bool,
    ) -> LaunchingRollout:
        """Start the collectors, for servers that are starting; returns at once, so that ranks can start meanwhile."""
        endpoint = servers.endpoint()  # asked once: a router that is started again is another actor at the same address
        samples = LaunchingSamples.launch(runtime, recipe, endpoint, num_shards, waiter, beside=beside)
        return cls(samples, servers, recipe, beside)

    def ready(self) -> RolloutPool:
        """Wait until everybody is ready."""
        servers = self.servers.ready()
        return RolloutPool(self.samples.ready(servers.restarts), servers, self.recipe, self.beside)
