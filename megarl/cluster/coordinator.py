"""The coordinator as a Ray actor: the book of a run in a process of its own, so that it goes on while the driver waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.algorithms.correction import WeightSums
from megarl.cluster.collector_vigil import Silent, until_silent
from megarl.cluster.collectors import RayLink
from megarl.cluster.process import ProcessFacts, ProcessSpec, configure_process
from megarl.core.progress import Progress
from megarl.core.types import EvalResult
from megarl.models.hf_config import load_model_config
from megarl.recipe.schema import Recipe
from megarl.rollout.coordinator import Coordinator
from megarl.rollout.tasks import DataFacts
from megarl.serving.client import ServerEndpoint


class CoordinatorActor:
    """What runs in the coordinator's process."""

    def __init__(
        self, spec: ProcessSpec, recipe: Recipe, num_shards: int, beside: bool, replay: Path | None = None
    ) -> None:
        self._facts = configure_process(spec)
        self._recipe, self._num_shards, self._beside, self._replay = recipe, num_shards, beside, replay
        self._progress = Progress(spec.progress)
        self._coordinator: Coordinator | None = None

    async def facts(self) -> ProcessFacts:
        """Where this process runs."""
        return self._facts

    async def start(self, handles: Sequence[Any], data: DataFacts) -> None:
        """Begin with these collectors, which have started. data: what each of them has read."""
        self._coordinator = Coordinator(
            self._recipe,
            [RayLink(handle) for handle in handles],
            data,
            model=load_model_config(self._recipe.model.path),
            num_shards=self._num_shards,
            beside=self._beside,
            progress=self._progress,
            replay=self._replay,
        )

    async def next(self, step: int, version: int) -> tuple[Any, ...]:
        """Counts, a plan for each shard, then for each collector its part and its numbers."""
        plan = await self._at_work().next(step, version)
        return (plan.info, *plan.plans, *plan.parts, *plan.numbers)

    async def settle(self, step: int, *measured: Any) -> tuple[Any, ...]:
        """Nothing, then for each collector what its second turn needs."""
        return (None, *self._at_work().settle(step, measured))

    async def learned(self, num_collectors: int, *parts: Any) -> dict[str, float]:
        """Metrics of a step's advantages. parts: what each collector measured, then the sums of each."""
        measured, sums = parts[:num_collectors], parts[num_collectors:]
        weights: Sequence[WeightSums] = sums
        return self._at_work().advantages.metrics(measured, weights)

    async def repeating(self) -> bool:
        """Whether steps are known that were made before the run was stopped."""
        return self._at_work().repeating

    async def behind(self) -> None:
        """Returns once servers are needed: what is known of steps that were made before has been made again."""
        await self._at_work().behind()

    async def hold(self) -> None:
        """No further request begins until `release`."""
        await self._at_work().hold()

    async def idle(self) -> None:
        """Returns once no collector has a request at the servers."""
        await self._at_work().idle()

    async def cut(self, servers: Sequence[ServerEndpoint]) -> None:
        """End the requests that run at these servers."""
        await self._at_work().cut(servers)

    async def release(self, version: int) -> None:
        """Requests begin again; the servers have weights of this version."""
        await self._at_work().release(version)

    async def evaluate(self, step: int, version: int) -> EvalResult:
        """Held-out answers, graded."""
        return await self._at_work().evaluate(step, version)

    async def watch(self) -> str:
        """Never returns: whoever waits for it learns of the end of this process."""
        await asyncio.Event().wait()
        return ""

    async def vigil(self, handle: Any) -> Silent:
        """Returns once a collector, which may still be starting, stands still or says nothing for too long."""
        return await until_silent(handle, self._recipe.deadlines, self._facts.address)

    async def died(self, owner: int) -> None:
        """A collector has died: what it had is made anew."""
        await self._at_work().replace(owner, None)

    async def replace(self, owner: int, handle: Any, _: DataFacts) -> None:
        """A collector, which has started, in the place of one that died."""
        await self._at_work().replace(owner, RayLink(handle))

    async def state(self) -> dict[str, Any]:
        """The place in the data, and what is under way."""
        return self._at_work().state()

    async def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved place."""
        self._at_work().load_state(state)

    async def rewind(self, to_step: int, to_number: int) -> bool:
        """Write down that the run goes back to a checkpoint; whether it has not been there too often."""
        return await self._at_work().rewind(to_step, to_number)

    async def forget(self, number: int, waiting: Sequence[Sequence[int]]) -> None:
        """No checkpoint from before the decision of this number is kept. waiting: groups under way then, as it has them."""
        await self._at_work().decisions.forget(number, waiting)

    async def close(self) -> None:
        """Listen no more. Raises LedgerError where the book does not add up."""
        await self._at_work().close()

    def _at_work(self) -> Coordinator:
        assert self._coordinator is not None, "the coordinator was not started"
        return self._coordinator
