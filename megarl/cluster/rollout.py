"""The driver's handle of generation: the coordinator, its collectors, and the server pool that they ask.

The driver sees counts and references. Which groups a step takes is the coordinator's to say; the collectors hand the tokens
to the object store, from where the ranks fetch them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from megarl.cluster.collector_pool import CollectorPool
from megarl.cluster.collectors import CollectorActor, ProbeResult
from megarl.cluster.coordinator import CoordinatorActor
from megarl.cluster.process import ProcessFacts
from megarl.cluster.roles import Batch, ColumnRefs
from megarl.cluster.runtime import Runtime
from megarl.cluster.servers import MARGIN_S, LaunchingPool, ServerPool
from megarl.cluster.slots import slot_on
from megarl.cluster.waits import Call, Pending, Waiter, Worker
from megarl.core.errors import GivenUpError, SyncError, WorkerDiedError
from megarl.core.log import get_logger
from megarl.core.log_tail import own_words
from megarl.core.pending import Finished
from megarl.core.protocols import Pending as AnyPending
from megarl.core.types import BatchInfo, EvalResult
from megarl.recipe.functions import needs_one_collector
from megarl.recipe.roles import ServerPart
from megarl.recipe.schema import Recipe
from megarl.rollout.local_advantages import column_names

log = get_logger(__name__)

# What servers can do without between answers. Their weights they cannot: nobody sends them again.
CACHE: tuple[ServerPart, ...] = ("kv_cache",)
UNKNOWN = ProcessFacts(0, "?")
# What one collector's core can read, grade and pack beside asking: docs/rollout.md.
SERVERS_A_COLLECTOR = 32


@dataclass(frozen=True)
class Learnable:
    """What a step is learned from: columns by name, and metrics of how they were made."""

    columns: dict[str, ColumnRefs]
    metrics: dict[str, float]


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
class RolloutPool:
    """Generation, as the loop sees it. beside: the servers go on while the ranks train."""

    coordinator: Worker
    collectors: CollectorPool
    servers: ServerPool
    waiter: Waiter
    recipe: Recipe
    num_shards: int
    beside: bool
    _evaluating: Overlapping | None = None

    def __post_init__(self) -> None:
        self.waiter.watches[self.coordinator.handle.watch.remote()] = self._coordinator_died

    def next(self, step: int, weight_version: int) -> Batch:
        """One step's samples, made while the last one trained where `beside`; the servers sleep until weights come else.

        A collector that dies is replaced, and the step made of what is left and what is made anew.
        """
        deadline_s = self.recipe.deadlines.rollout_s
        with self._serving(then_sleep=self.recipe.rollout.offload), self.servers.traffic():
            while True:
                try:
                    batch = self._next(step, weight_version, deadline_s)
                    break
                except WorkerDiedError as error:
                    if not self.collectors.replaced(error):
                        raise
            if not self.beside and batch.info.metrics["rollout/groups_running"]:
                self._cut(deadline_s)
        return batch

    def _next(self, step: int, weight_version: int, deadline_s: float) -> Batch:
        # One that dies meanwhile takes what the step has of it along: who comes in its place has nothing to hand over.
        collectors = list(self.collectors.workers)
        shards, owners = self.num_shards, len(collectors)
        ask = self.coordinator.handle.next.options(num_returns=1 + shards + 2 * owners)
        info, *rest = ask.remote(step, weight_version)
        plans, parts, numbers = rest[:shards], rest[shards : shards + owners], rest[shards + owners :]
        counts: BatchInfo = self._wait(info, "rollout", deadline_s)
        handed = [
            worker.handle.part.options(num_returns=1 + shards).remote(part)
            for worker, part in zip(collectors, parts, strict=True)
        ]
        calls = [Call(worker, done) for worker, (done, *_) in zip(collectors, handed, strict=True)]
        self._wait_all(calls, "rollout", deadline_s)
        blocks = tuple(zip(*(blocks for _, *blocks in handed), strict=True))
        return Batch(tuple(plans), blocks, counts, tuple(numbers))

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

    def advantages(self, batch: Batch, columns: dict[str, ColumnRefs]) -> Learnable:
        """What the updates learn from: references, one a shard and collector for each column, and metrics.

        columns: the roles'. In two turns: collectors measure, the coordinator settles what is over the whole step, and they
        finish. One that dies meanwhile is replaced, and asked anew: all that it needs is in the object store.
        """
        made = column_names(self.recipe)
        if not made:
            return Learnable({}, {})  # the loss asks the roles alone
        while True:
            try:
                return self._advantages(batch, columns, made)
            except WorkerDiedError as error:
                if not self.collectors.replaced(error):
                    raise

    def _advantages(self, batch: Batch, columns: dict[str, ColumnRefs], made: tuple[str, ...]) -> Learnable:
        deadline_s, owners, shards = self.recipe.deadlines.train_s, len(self.collectors.workers), self.num_shards
        collectors = list(self.collectors.workers)
        measuring = [
            worker.handle.measure.options(num_returns=2).remote(
                batch.numbers[owner],
                tuple(columns),
                shards,
                *(blocks[owner] for blocks in batch.blocks),
                *(shard[owner] for column in columns.values() for shard in column),
            )
            for owner, worker in enumerate(collectors)
        ]
        calls = [Call(worker, done) for worker, (done, _) in zip(collectors, measuring, strict=True)]
        self._wait_all(calls, "advantages", deadline_s)
        measured = [each for _, each in measuring]
        settle = self.coordinator.handle.settle.options(num_returns=1 + owners)
        done, *settled = settle.remote(batch.info.step, *measured)
        self._wait(done, "advantages", deadline_s)
        finishing = [
            worker.handle.finish.options(num_returns=1 + shards * len(made)).remote(made, each)
            for worker, each in zip(collectors, settled, strict=True)
        ]
        calls = [Call(worker, sums) for worker, (sums, *_) in zip(collectors, finishing, strict=True)]
        self._wait_all(calls, "advantages", deadline_s)
        metrics = self.coordinator.handle.learned.remote(owners, *measured, *(sums for sums, *_ in finishing))
        learned = {
            name: tuple(zip(*(parts[1 + at * shards : 1 + (at + 1) * shards] for parts in finishing), strict=True))
            for at, name in enumerate(made)
        }
        return Learnable(learned, self._wait(metrics, "advantages", deadline_s))

    def evaluate(self, step: int, weight_version: int) -> AnyPending[EvalResult]:
        """Held-out answers, graded. Where the recipe says so, they come while training goes on, before the next weights."""
        handle, deadline_s = self.coordinator.handle, self.recipe.deadlines.rollout_s
        if self.recipe.eval.overlap and self.beside:
            self._evaluating = Overlapping(
                lambda version: self._evaluation(step, version), weight_version, self.servers.traffic
            )
            return self._evaluating
        with self._serving(then_sleep=CACHE), self.servers.traffic():
            result: EvalResult = self._wait(handle.evaluate.remote(step, weight_version), "eval", deadline_s)
        return Finished(result)

    def _evaluation(self, step: int, weight_version: int) -> Pending[EvalResult]:
        call = Call(self.coordinator, self.coordinator.handle.evaluate.remote(step, weight_version))
        deadline_s = self.recipe.deadlines.rollout_s + MARGIN_S
        self.waiter.follow([call], lambda _, failure: None)  # so that its end is seen at once; `poll` has its result
        return Pending(self.waiter, [call], "eval", "rollout", deadline_s, lambda results: results[0])

    def _end_evaluation(self) -> None:
        """Wait for an evaluation that overlaps: it is of the weights that the servers still have.

        Where none of these is left, nobody has the weights any more: it is asked anew of those that come.
        """
        evaluating = self._evaluating
        if evaluating is not None:
            deadline_s = self.recipe.deadlines.rollout_s + MARGIN_S
            self.waiter.until(lambda: evaluating.ended or not self.servers.servers, "An evaluation", deadline_s)
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
            self.servers.pause(keep_kv=self.recipe.rollout.keep_kv, deadline_s=deadline_s)
        elif mode == "finish":
            self._wait(self.coordinator.handle.hold.remote(), "sync", deadline_s)
            self._wait(self.coordinator.handle.idle.remote(), "sync", self.recipe.deadlines.rollout_s)
        else:
            self._cut(deadline_s)

    @property
    def keeps_kv(self) -> bool:
        """Whether servers hold requests with the KV of the old weights while new ones come."""
        settings = self.recipe.rollout
        return self.beside and settings.in_flight == "in_place" and settings.keep_kv

    def arrived(self) -> None:
        """New weights have arrived: what was paused in place goes on."""
        if self.beside and self.recipe.rollout.in_flight == "in_place":
            self.servers.resume(self.recipe.deadlines.sync_s)

    def resume(self, weight_version: int) -> None:
        """New weights are verified: samples are asked for again."""
        release = self.coordinator.handle.release.remote(weight_version)
        self._wait(release, "sync", self.recipe.deadlines.sync_s)
        if self._evaluating is not None:
            self._evaluating.restart(weight_version)

    def probe(self) -> tuple[Any, Any]:
        """References to the plan and the block of sequences to verify a weight sync on."""
        prober = self.collectors.workers[0]
        done, plan, block = prober.handle.probe.options(num_returns=3).remote()
        self._wait_all([Call(prober, done)], "sync", self.recipe.deadlines.sync_s)
        return plan, block

    def verify(self, trainer: Any, tolerance: float, version: int) -> float:
        """Compare all servers that have new weights with the trainer's column (a reference); the largest difference.

        Those that pass serve from now on; those that give no answer leave the pool. Raises SyncError.
        """
        deadline_s, prober = self.recipe.deadlines.sync_s, self.collectors.workers[0]
        with self._serving(then_sleep=CACHE):
            endpoints = [server.endpoint for server in self.servers.holding()]
            verify = prober.handle.verify.remote(endpoints, trainer, tolerance, version, deadline_s)
            [result] = self._wait_all([Call(prober, verify)], "sync", deadline_s)
            found: ProbeResult = result
            for endpoint in endpoints:
                if endpoint.name in found.failed:
                    self.servers.drop(endpoint, found.failed[endpoint.name])
            self.servers.admit(version)
        return found.diff_max

    def state(self) -> dict[str, Any]:
        """The place in the data and what is under way, for a checkpoint."""
        state: dict[str, Any] = self._wait(self.coordinator.handle.state.remote(), "data", self.recipe.deadlines.save_s)
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved place."""
        self._wait(self.coordinator.handle.load_state.remote(state), "data", self.recipe.deadlines.start_s)

    def close(self) -> None:
        """End the servers and the router; the other processes end with the run. Raises LedgerError."""
        self._wait(self.coordinator.handle.close.remote(), "end", self.recipe.deadlines.sync_s)
        self.servers.close()

    def _cut(self, deadline_s: float) -> None:
        """End what runs at the servers; what there is of it stays with the collectors, and goes on later."""
        endpoints = [server.endpoint for server in self.servers.servers]
        self._wait(self.coordinator.handle.cut.remote(endpoints), "sync", deadline_s)

    def _coordinator_died(self, how: str) -> None:
        worker = self.coordinator
        raise GivenUpError(
            f"{worker.name} (pid {worker.facts.pid} on {worker.facts.host}) died, and nobody knows any more which samples "
            f"there are. {how}\n--- end of {worker.spec.log}:\n{own_words(worker.spec.log)}"
        )

    def _wait(self, ref: Any, phase: str, deadline_s: float) -> Any:
        return self._wait_all([Call(self.coordinator, ref)], phase, deadline_s)[0]

    def _wait_all(self, calls: Sequence[Call], phase: str, deadline_s: float) -> list[Any]:
        return self.waiter.wait(calls, phase=phase, role="rollout", deadline_s=deadline_s + MARGIN_S)


@dataclass(frozen=True)
class LaunchingRollout:
    """Servers, collectors and their coordinator, starting."""

    coordinator: Worker
    collectors: list[Worker]
    starts: list[Call]
    servers: LaunchingPool
    waiter: Waiter
    recipe: Recipe
    num_shards: int
    beside: bool
    start: Callable[[int], Worker]

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
        count = num_collectors(recipe)
        nodes = runtime.nodes.members
        endpoint = servers.endpoint()  # asked once: a router that is started again is another actor at the same address

        def start(owner: int) -> Worker:
            node = nodes[owner % len(nodes)] if count > 1 else runtime.here
            spec = runtime.process("collector" if count == 1 else f"collector {owner}", node)
            actor = ray.remote(CollectorActor).options(**slot_on(node).options)
            return Worker(actor.remote(spec, recipe, endpoint, count), spec, UNKNOWN)

        collectors = [start(owner) for owner in range(count)]
        spec = runtime.process("coordinator")
        actor = ray.remote(CoordinatorActor).options(**slot_on(runtime.here).options)
        coordinator = Worker(actor.remote(spec, recipe, num_shards, beside), spec, UNKNOWN)
        starts = [Call(worker, worker.handle.facts.remote()) for worker in (coordinator, *collectors)]
        starts += [Call(worker, worker.handle.start.remote()) for worker in collectors]
        return cls(coordinator, collectors, starts, servers, waiter, recipe, num_shards, beside, start)

    def ready(self) -> RolloutPool:
        """Wait until everybody is ready."""
        servers = self.servers.ready()
        deadline_s = self.recipe.deadlines.start_s
        facts = self.waiter.wait(self.starts, phase="start", role="rollout", deadline_s=deadline_s)
        everyone = [self.coordinator, *self.collectors]
        known = [
            Worker(worker.handle, worker.spec, fact)
            for worker, fact in zip(everyone, facts[: len(everyone)], strict=True)
        ]
        coordinator, *collectors = known
        begin = coordinator.handle.start.remote([worker.handle for worker in collectors], self.starts[-1].result)
        self.waiter.wait([Call(coordinator, begin)], phase="start", role="rollout", deadline_s=deadline_s)
        pool = CollectorPool(coordinator, collectors, servers.restarts, self.waiter, self.start)
        return RolloutPool(coordinator, pool, servers, self.waiter, self.recipe, self.num_shards, self.beside)


def num_collectors(recipe: Recipe) -> int:
    """Processes that ask and grade: as the recipe says, or one for every 32 servers.

    One alone where the advantage has to see all tokens of a step.
    """
    if recipe.rollout.collectors is not None:
        return recipe.rollout.collectors
    count = -(-recipe.rollout.num_servers // SERVERS_A_COLLECTOR)
    return 1 if count > 1 and needs_one_collector(recipe.algorithm) else count
