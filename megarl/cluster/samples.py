"""The driver's handle of samples: the coordinator and its collectors, wherever what they hand over comes from.

The driver sees counts and references. Which groups a step takes is the coordinator's to say; the collectors hand the tokens
to the object store, from where the ranks fetch them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from megarl.cluster.collector_pool import CollectorPool
from megarl.cluster.collectors import CollectorActor
from megarl.cluster.coordinator import CoordinatorActor
from megarl.cluster.healing import Restarts
from megarl.cluster.roles import Batch, ColumnRefs
from megarl.cluster.runtime import Runtime
from megarl.cluster.servers import MARGIN_S
from megarl.cluster.slots import slot_on
from megarl.cluster.waits import Call, Waiter, Worker
from megarl.core.errors import CoordinatorDiedError, MegarlError
from megarl.core.log import get_logger
from megarl.core.log_tail import own_words
from megarl.core.types import BatchInfo
from megarl.recipe.functions import needs_one_collector
from megarl.recipe.schema import Recipe
from megarl.recipe.scoring import served_columns
from megarl.rollout.drift import learns
from megarl.rollout.local_advantages import READ, column_names

log = get_logger(__name__)

# What one collector's core can read, grade and pack beside asking: docs/rollout.md.
SERVERS_A_COLLECTOR = 32
END_S = 60.0  # for a collector to end episodes under way, environments, tools and graders, each of which has a deadline
# For the same where a life ends early: somebody waits, and whoever ends jobs for a scheduler soon kills them.
LEAVE_S = 15.0


@dataclass(frozen=True)
class Learnable:
    """What a step is learned from: columns by name, and metrics of how they were made. learns: off, it is left out."""

    columns: dict[str, ColumnRefs]
    metrics: dict[str, float]
    learns: bool = True


@dataclass
class Samples:
    """The coordinator and its collectors, as the driver asks them."""

    coordinator: Worker
    collectors: CollectorPool
    waiter: Waiter
    recipe: Recipe
    num_shards: int

    def __post_init__(self) -> None:
        self.waiter.deaths.watch(self.coordinator.facts)
        self.waiter.watches[self.coordinator.handle.watch.remote()] = self._coordinator_died

    def next(self, step: int, weight_version: int) -> Batch:
        """One step's samples. A collector that dies is replaced, and the step made of what is left and what is made anew."""
        return self.collectors.asked(lambda: self._next(step, weight_version, self.recipe.deadlines.rollout_s))

    def _next(self, step: int, weight_version: int, deadline_s: float) -> Batch:
        # One that dies meanwhile takes what the step has of it along: who comes in its place has nothing to hand over.
        collectors = list(self.collectors.workers)
        shards, owners = self.num_shards, len(collectors)
        ask = self.coordinator.handle.next.options(num_returns=1 + shards + 2 * owners)
        info, *rest = ask.remote(step, weight_version)
        plans, parts, numbers = rest[:shards], rest[shards : shards + owners], rest[shards + owners :]
        counts: BatchInfo = self.wait(info, "rollout", deadline_s)
        names = served_columns(self.recipe)
        handed = [
            worker.handle.part.options(num_returns=1 + shards * (1 + len(names))).remote(part)
            for worker, part in zip(collectors, parts, strict=True)
        ]
        calls = [Call(worker, done) for worker, (done, *_) in zip(collectors, handed, strict=True)]
        self.wait_all(calls, "rollout", deadline_s)
        by_shard = tuple(zip(*(given for _, *given in handed), strict=True))
        blocks, *columns = (by_shard[at : at + shards] for at in range(0, len(by_shard), shards))
        return Batch(tuple(plans), blocks, counts, tuple(numbers), columns=dict(zip(names, columns, strict=True)))

    def advantages(self, batch: Batch, columns: dict[str, ColumnRefs]) -> Learnable:
        """What the updates learn from: references, one a shard and collector for each column, and metrics.

        columns: the roles'. In two turns: collectors measure, the coordinator settles what is over the whole step, and they
        finish. One that dies meanwhile is replaced, and asked anew: all that it needs is in the object store.
        """
        made = column_names(self.recipe)
        if not made:
            return Learnable({}, {})  # the loss asks the roles alone
        columns = {name: column for name, column in columns.items() if name in READ}
        return self.collectors.asked(lambda: self._advantages(batch, columns, made))

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
        self.wait_all(calls, "advantages", deadline_s)
        measured = [each for _, each in measuring]
        settle = self.coordinator.handle.settle.options(num_returns=1 + owners)
        done, *settled = settle.remote(batch.info.step, *measured)
        self.wait(done, "advantages", deadline_s)
        finishing = [
            worker.handle.finish.options(num_returns=1 + shards * len(made)).remote(made, each)
            for worker, each in zip(collectors, settled, strict=True)
        ]
        calls = [Call(worker, sums) for worker, (sums, *_) in zip(collectors, finishing, strict=True)]
        self.wait_all(calls, "advantages", deadline_s)
        metrics = self.coordinator.handle.learned.remote(owners, *measured, *(sums for sums, *_ in finishing))
        learned = {
            name: tuple(zip(*(parts[1 + at * shards : 1 + (at + 1) * shards] for parts in finishing), strict=True))
            for at, name in enumerate(made)
        }
        told = self.wait(metrics, "advantages", deadline_s)
        return Learnable(learned, told, learns(self.recipe.algorithm, batch.info.step, told))

    def state(self) -> dict[str, Any]:
        """The place in the data and what is under way, for a checkpoint."""
        state: dict[str, Any] = self.wait(self.coordinator.handle.state.remote(), "data", self.recipe.deadlines.save_s)
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved place."""
        self.wait(self.coordinator.handle.load_state.remote(state), "data", self.recipe.deadlines.start_s)

    def rewind(self, to_step: int, to_number: int) -> bool:
        """Write down that the run goes back to a checkpoint; whether it has not been there too often."""
        ask = self.coordinator.handle.rewind.remote(to_step, to_number)
        return bool(self.wait(ask, "data", self.recipe.deadlines.save_s))

    def forget(self, number: int, waiting: Sequence[Sequence[int]]) -> None:
        """No checkpoint from before the decision of this number is kept. waiting: groups under way then, as it has them."""
        ask = self.coordinator.handle.forget.remote(number, waiting)
        self.wait(ask, "data", self.recipe.deadlines.save_s)

    def close(self) -> None:
        """The book has to add up, and what plays episodes gives back what it holds; the processes end with the run.

        Raises LedgerError.
        """
        self.wait(self.coordinator.handle.close.remote(), "end", self.recipe.deadlines.sync_s)
        ends = [Call(worker, worker.handle.close.remote()) for worker in self.collectors.workers]
        try:
            self.wait_all(ends, "end", END_S)
        except MegarlError as error:  # of a user's code, and what the run has made is whole
            log.warning("a collector did not end in order: %s", error)

    def leave(self) -> None:
        """Of a life that ends early: what plays episodes gives back what it holds, in a while, wherever that can be."""
        if self.recipe.agent is None or self.waiter.nodes.services.ended():
            return  # nothing is held, or nobody can be asked
        try:
            # It listens no more first: what its collectors are cut off from says nothing of their groups.
            ray.wait([self.coordinator.handle.close.remote()], timeout=LEAVE_S / 3)
            ends = [worker.handle.close.remote() for worker in self.collectors.workers]
            _, late = ray.wait(ends, num_returns=len(ends), timeout=LEAVE_S)
        except RayError as error:
            log.warning("collectors could not be told that the run ends: %s", error)
            return
        if late:
            log.warning("%d of %d collectors had not closed their episodes after %g s", len(late), len(ends), LEAVE_S)

    def _coordinator_died(self, how: str) -> None:
        worker = self.coordinator
        raise CoordinatorDiedError(
            f"{worker.name} (pid {worker.facts.pid} on {worker.facts.host}) died, and nobody knows any more which samples "
            f"there are. {self.waiter.deaths.how(worker.facts, how)}\n--- end of {worker.spec.log}:\n{own_words(worker.spec.log)}"
        )

    def wait(self, ref: Any, phase: str, deadline_s: float) -> Any:
        """What the coordinator answers."""
        return self.wait_all([Call(self.coordinator, ref)], phase, deadline_s)[0]

    def wait_all(self, calls: Sequence[Call], phase: str, deadline_s: float) -> list[Any]:
        """What these answer, in their order."""
        return self.waiter.wait(calls, phase=phase, role="rollout", deadline_s=deadline_s + MARGIN_S)


@dataclass(frozen=True)
class LaunchingSamples:
    """Collectors and their coordinator, starting."""

    coordinator: Worker
    collectors: list[Worker]
    starts: list[Call]
    waiter: Waiter
    recipe: Recipe
    num_shards: int
    start: Callable[[int], Worker]

    @classmethod
    def launch(
        cls,
        runtime: Runtime,
        recipe: Recipe,
        endpoint: Any,
        num_shards: int,
        waiter: Waiter,
        *,
        beside: bool,
        replay: Path | None = None,
    ) -> LaunchingSamples:
        """Start them; returns at once, so that ranks can start meanwhile.

        endpoint: of the router, once it is known. replay: the journal that all samples come from, in the place of servers.
        """
        count = num_collectors(recipe)
        nodes = runtime.nodes.members

        def start(owner: int) -> Worker:
            node = nodes[owner % len(nodes)] if count > 1 else runtime.here
            spec = runtime.process("collector" if count == 1 else f"collector {owner}", node)
            actor = ray.remote(CollectorActor).options(**slot_on(node).options)
            return Worker(actor.remote(spec, recipe, endpoint, count, replay), spec)

        collectors = [start(owner) for owner in range(count)]
        spec = runtime.process("coordinator")
        actor = ray.remote(CoordinatorActor).options(**slot_on(runtime.here).options)
        coordinator = Worker(actor.remote(spec, recipe, num_shards, beside, replay), spec)
        starts = [Call(worker, worker.handle.facts.remote()) for worker in (coordinator, *collectors)]
        starts += [Call(worker, worker.handle.start.remote()) for worker in collectors]
        return cls(coordinator, collectors, starts, waiter, recipe, num_shards, start)

    def ready(self, restarts: Restarts) -> Samples:
        """Wait until everybody is ready."""
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
        pool = CollectorPool(coordinator, collectors, restarts, self.waiter, self.start)
        return Samples(coordinator, pool, self.waiter, self.recipe, self.num_shards)


def num_collectors(recipe: Recipe) -> int:
    """Processes that ask and grade: as the recipe says, or one for every 32 servers.

    One alone where the advantage has to see all tokens of a step.
    """
    if recipe.rollout.collectors is not None:
        return recipe.rollout.collectors
    count = -(-recipe.rollout.num_servers // SERVERS_A_COLLECTOR)
    return 1 if count > 1 and needs_one_collector(recipe.algorithm) else count
