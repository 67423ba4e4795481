"""The driver's handle of generation: the collector's process, in front of the server pool."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from megarl.cluster.process import ProcessFacts, ProcessSpec, configure_process
from megarl.cluster.roles import Batch, ColumnRefs
from megarl.cluster.runtime import Runtime
from megarl.cluster.servers import MARGIN_S, LaunchingPool, ServerPool
from megarl.cluster.slots import slot_on
from megarl.cluster.waits import Call, Waiter, Worker
from megarl.core.errors import SyncError
from megarl.core.log import get_logger
from megarl.core.progress import Progress
from megarl.core.types import BatchInfo, Column, EvalResult, Shard
from megarl.recipe.roles import ServerPart
from megarl.recipe.schema import Recipe
from megarl.rollout.advantages import column_names
from megarl.rollout.collector import Collector
from megarl.serving.client import ServerEndpoint
from megarl.sync.verify import probe_servers, probe_shard, split_column, verify

log = get_logger(__name__)

# What servers can do without between answers. Their weights they cannot: nobody sends them again.
CACHE: tuple[ServerPart, ...] = ("kv_cache",)


@dataclass(frozen=True)
class Learnable:
    """What a step is learned from: columns by name, and metrics of how they were made."""

    columns: dict[str, ColumnRefs]
    metrics: dict[str, float]


@dataclass(frozen=True)
class ProbeResult:
    """What a probe of all servers found."""

    diff_max: float  # nats
    failed: dict[str, str]  # server -> why it gave no answer


class CollectorActor:
    """What runs in the collector's process."""

    def __init__(self, spec: ProcessSpec, recipe: Recipe, router: ServerEndpoint, num_shards: int) -> None:
        self._facts = configure_process(spec)
        self._collector = Collector.open(recipe, router, num_shards, Progress(spec.progress))
        self._num_shards = num_shards
        self._probe: list[list[int]] = []

    async def facts(self) -> ProcessFacts:
        """Where this process runs."""
        return self._facts

    async def start(self) -> None:
        """Start the graders."""
        await self._collector.start()

    async def generate(self, step: int, weight_version: int) -> tuple[BatchInfo | Shard, ...]:
        """Counts, then one shard a data-parallel rank."""
        shards, info = await self._collector.generate(step, weight_version)
        return (info, *shards)

    async def advantages(
        self, step: int, names: tuple[str, ...], made: tuple[str, ...], *parts: Column
    ) -> tuple[dict[str, float] | Column, ...]:
        """Metrics, then for each name in `made` one column a shard. parts: for each of `names`, one column a shard."""
        each = self._num_shards
        columns = {name: parts[index * each : (index + 1) * each] for index, name in enumerate(names)}
        learnable = self._collector.advantages(step, columns)
        return (learnable.metrics, *(column for name in made for column in learnable.columns[name]))

    async def evaluate(self, step: int, weight_version: int) -> EvalResult:
        """Held-out answers, graded."""
        return await self._collector.evaluate(step, weight_version)

    async def notice(self) -> str:
        """The next line for people, once there is one."""
        return await self._collector.notices.next()

    async def probe(self) -> tuple[None, Shard]:
        """Nothing, then the sequences that the next `verify` asks the servers about."""
        self._probe = self._collector.probe()
        return None, probe_shard(self._probe)

    async def verify(
        self, servers: list[ServerEndpoint], trainer: Column, tolerance: float, version: int, deadline_s: float
    ) -> ProbeResult:
        """The servers' log-probs of the probe against the trainer's, of those that answer. Raises SyncError."""
        answers = await probe_servers(servers, self._probe, deadline_s)
        if not answers.logprobs:
            return ProbeResult(0.0, answers.failed)
        diff = verify(split_column(trainer, self._probe), answers.logprobs, tolerance, version)
        return ProbeResult(diff, answers.failed)

    async def state(self) -> dict[str, Any]:
        """The place in the data."""
        return self._collector.state()

    async def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved place."""
        self._collector.load_state(state)

    async def close(self) -> None:
        """End the graders and the connections."""
        await self._collector.close()


@dataclass(frozen=True)
class RolloutPool:
    """Generation, as the loop sees it."""

    collector: Worker
    servers: ServerPool
    waiter: Waiter
    recipe: Recipe
    num_shards: int

    @classmethod
    def launch(
        cls, runtime: Runtime, recipe: Recipe, servers: LaunchingPool, num_shards: int, waiter: Waiter
    ) -> LaunchingRollout:
        """Start the collector, for servers that are starting; returns at once, so that ranks can start meanwhile."""
        spec = runtime.process("collector")
        actor = ray.remote(CollectorActor).options(**slot_on(runtime.here).options)
        handle = actor.remote(spec, recipe, servers.endpoint(), num_shards)
        collector = Worker(handle, spec, ProcessFacts(0, "?"))
        starts = [Call(collector, handle.facts.remote()), Call(collector, handle.start.remote())]
        return LaunchingRollout(collector, starts, servers, waiter, recipe, num_shards)

    def generate(self, step: int, weight_version: int) -> Batch:
        """One step's samples: generated, graded, filtered, packed. The servers sleep until weights come."""
        with self._serving(then_sleep=self.recipe.rollout.offload), self.servers.traffic():
            generate = self.collector.handle.generate.options(num_returns=1 + self.num_shards)
            info, *shards = generate.remote(step, weight_version)
            return Batch(tuple(shards), self._wait(info, "rollout", self.recipe.deadlines.rollout_s))

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
        """What the updates learn from: references, one a shard for each column, and metrics. columns: the roles'."""
        made, each = column_names(self.recipe), self.num_shards
        if not made:
            return Learnable({}, {})  # the loss asks the roles alone
        remote = self.collector.handle.advantages.options(num_returns=1 + each * len(made))
        parts = [part for column in columns.values() for part in column]
        metrics, *references = remote.remote(batch.info.step, tuple(columns), made, *parts)
        learned = {name: tuple(references[index * each : (index + 1) * each]) for index, name in enumerate(made)}
        return Learnable(learned, self._wait(metrics, "advantages", self.recipe.deadlines.train_s))

    def evaluate(self, step: int, weight_version: int) -> EvalResult:
        """Held-out answers, graded."""
        with self._serving(then_sleep=CACHE), self.servers.traffic():
            evaluate = self.collector.handle.evaluate.remote(step, weight_version)
            result: EvalResult = self._wait(evaluate, "eval", self.recipe.deadlines.rollout_s)
        return result

    def probe(self) -> Any:
        """Reference to a shard of sequences to verify a weight sync on."""
        done, shard = self.collector.handle.probe.options(num_returns=2).remote()
        self._wait(done, "sync", self.recipe.deadlines.sync_s)
        return shard

    def verify(self, trainer: Any, tolerance: float, version: int) -> float:
        """Compare all servers that have new weights with the trainer's column (a reference); the largest difference.

        Those that pass serve from now on; those that give no answer leave the pool. Raises SyncError.
        """
        deadline_s = self.recipe.deadlines.sync_s
        with self._serving(then_sleep=CACHE):
            endpoints = [server.endpoint for server in self.servers.holding()]
            verify = self.collector.handle.verify.remote(endpoints, trainer, tolerance, version, deadline_s)
            result: ProbeResult = self._wait(verify, "sync", deadline_s)
            for endpoint in endpoints:
                if endpoint.name in result.failed:
                    self.servers.drop(endpoint, result.failed[endpoint.name])
            self.servers.admit(version)
        return result.diff_max

    def state(self) -> dict[str, Any]:
        """The place in the data, for a checkpoint."""
        state: dict[str, Any] = self._wait(self.collector.handle.state.remote(), "data", self.recipe.deadlines.save_s)
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved place."""
        self._wait(self.collector.handle.load_state.remote(state), "data", self.recipe.deadlines.start_s)

    def listen(self) -> None:
        """Show what the collector has to tell, also while it is waited for."""
        self.waiter.notices[self.collector.handle.notice.remote()] = self._told

    def _told(self, line: str) -> None:
        log.warning("%s", line)
        self.listen()

    def close(self) -> None:
        """End the servers and the router; the collector ends with the run."""
        self.servers.close()

    def _wait(self, ref: Any, phase: str, deadline_s: float) -> Any:
        calls = [Call(self.collector, ref)]
        return self.waiter.wait(calls, phase=phase, role="rollout", deadline_s=deadline_s + MARGIN_S)[0]


@dataclass(frozen=True)
class LaunchingRollout:
    """Servers and their collector, starting."""

    collector: Worker
    starts: list[Call]
    servers: LaunchingPool
    waiter: Waiter
    recipe: Recipe
    num_shards: int

    def ready(self) -> RolloutPool:
        """Wait until everybody is ready."""
        servers = self.servers.ready()
        deadline_s = self.recipe.deadlines.start_s
        facts, _ = self.waiter.wait(self.starts, phase="start", role="rollout", deadline_s=deadline_s)
        collector = Worker(self.collector.handle, self.collector.spec, facts)
        pool = RolloutPool(collector, servers, self.waiter, self.recipe, self.num_shards)
        pool.listen()
        return pool
