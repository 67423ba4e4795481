"""Collectors as Ray actors: the process of one, and the coordinator's way to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from megarl.agents.player import open_player
from megarl.cluster.network import own_address
from megarl.cluster.process import ProcessFacts, ProcessSpec, configure_process
from megarl.core.errors import MegarlError
from megarl.core.types import Block, FloatArray, ShardPlan
from megarl.recipe.schema import Recipe
from megarl.rollout.batcher import Part
from megarl.rollout.collector import Collector
from megarl.rollout.links import LinkLostError
from megarl.rollout.local_advantages import LocalAdvantages, Measured, SampleNumbers, Settled
from megarl.rollout.probe import Probe
from megarl.rollout.replayed import ReplayCollector
from megarl.rollout.tasks import DataFacts, EvalFacts, GroupTask, Load, News
from megarl.serving.client import ServerEndpoint
from megarl.sync.verify import probe_servers, probe_shard, split_column, verify


@dataclass(frozen=True)
class ProbeResult:
    """What a probe of all servers found."""

    diff_max: float  # nats
    failed: dict[str, str]  # server -> why it gave no answer


class CollectorActor:
    """What runs in a collector's process."""

    def __init__(
        self,
        spec: ProcessSpec,
        recipe: Recipe,
        router: ServerEndpoint | None,
        num_collectors: int,
        replay: Path | None = None,
    ) -> None:
        """replay: the journal that all samples come from, where there is no router."""
        self._facts = configure_process(spec)
        self._collector = _open(recipe, router, num_collectors, replay, spec.address)
        self._advantages = LocalAdvantages(recipe)
        self._probe = Probe([])

    async def facts(self) -> ProcessFacts:
        """Where this process runs."""
        return self._facts

    async def start(self) -> DataFacts:
        """Start the graders."""
        return await self._collector.start()

    async def watch(self) -> str:
        """Never returns: whoever waits for it learns of the end of this process."""
        await asyncio.Event().wait()
        return ""

    async def begin(self, tasks: Sequence[GroupTask]) -> None:
        """Begin to make these groups."""
        await self._collector.begin(tasks)

    async def news(self) -> News:
        """Groups that have finished since, once there is one."""
        return await self._collector.news()

    async def load(self) -> Load:
        """What its requests do at the servers, as of now."""
        return await self._collector.load()

    async def cancel(self, groups: Collection[int]) -> None:
        """Stop making these groups."""
        await self._collector.cancel(groups)

    async def forget(self, groups: Collection[int]) -> None:
        """Groups that have been trained on."""
        await self._collector.forget(groups)

    async def hold(self) -> None:
        """Begin no further request."""
        await self._collector.hold()

    async def idle(self) -> None:
        """Returns once no request runs."""
        await self._collector.idle()

    async def cut(self, servers: Sequence[ServerEndpoint]) -> None:
        """End the requests at these servers, and begin none."""
        await self._collector.cut(servers)

    async def release(self) -> None:
        """Begin requests again."""
        await self._collector.release()

    async def write(self, step: int, groups: Collection[int]) -> None:
        """The first samples of these groups, for reading."""
        await self._collector.write(step, groups)

    async def evaluate(self, rows: Sequence[int], step: int) -> EvalFacts:
        """Held-out answers, graded."""
        return await self._collector.evaluate(rows, step)

    async def part(self, part: Part) -> tuple[Block | FloatArray | None, ...]:
        """Nothing, then this collector's block of each shard of a step, then the columns that came with its samples."""
        return (None, *await self._collector.part(part), *await self._collector.columns(part))

    async def measure(
        self, samples: SampleNumbers, names: tuple[str, ...], num_shards: int, *parts: Any
    ) -> tuple[None, Measured]:
        """Nothing, then the first turn of a step's advantages.

        parts: this collector's block of each shard, then for each name its column, one array a shard.
        """
        blocks, rest = parts[:num_shards], parts[num_shards:]
        columns = {name: rest[index * num_shards : (index + 1) * num_shards] for index, name in enumerate(names)}
        return None, self._advantages.measure(samples, blocks, columns)

    async def finish(self, made: tuple[str, ...], settled: Settled) -> tuple[Any, ...]:
        """Sums for metrics, then for each name in `made` one array a shard: the second turn."""
        learned = self._advantages.finish(settled)
        return (learned.sums, *(part for name in made for part in learned.columns[name]))

    async def notice(self) -> str:
        """The next line for people, once there is one."""
        return await self._collector.notices.next()

    async def probe(self) -> tuple[None, ShardPlan, Block]:
        """Nothing, then the sequences that the next `verify` asks the servers about, as a shard."""
        self._probe = await self._collector.probe()
        return None, *probe_shard(self._probe.rows, self._probe.images)

    async def verify(
        self, servers: list[ServerEndpoint], trainer: FloatArray, tolerance: float, version: int, deadline_s: float
    ) -> ProbeResult:
        """The servers' log-probs of the probe against the trainer's, of those that answer. Raises SyncError."""
        rows, images = self._probe.rows, self._probe.images
        answers = await probe_servers(servers, rows, deadline_s, images)
        if not answers.logprobs:
            return ProbeResult(0.0, answers.failed)
        diff = verify(split_column(trainer, rows, images), answers.logprobs, tolerance, version)
        return ProbeResult(diff, answers.failed)

    async def close(self) -> None:
        """End the graders and the connections."""
        await self._collector.close()


def _open(
    recipe: Recipe, router: ServerEndpoint | None, num_collectors: int, replay: Path | None, address: str
) -> Collector | ReplayCollector:
    if replay is not None:
        return ReplayCollector.open(replay, recipe)
    assert router is not None, "without a journal to replay, a collector asks a router"
    if recipe.agent is not None and recipe.agent.listen == "node" and ip_address(address).is_loopback:
        address = own_address()  # of a run on one machine: its own processes need no other
    player = partial(open_player, recipe, router, address) if recipe.agent is not None else None
    return Collector.open(recipe, router, num_collectors, player)


class RayLink:
    """A collector in another process: CollectorLink over Ray."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def begin(self, tasks: Sequence[GroupTask]) -> None:  # noqa: D102
        await _answer(self._handle.begin.remote(tasks))

    async def news(self) -> News:  # noqa: D102
        news: News = await _answer(self._handle.news.remote())
        return news

    async def load(self) -> Load:  # noqa: D102
        load: Load = await _answer(self._handle.load.remote())
        return load

    async def cancel(self, groups: Collection[int]) -> None:  # noqa: D102
        await _answer(self._handle.cancel.remote(groups))

    async def forget(self, groups: Collection[int]) -> None:  # noqa: D102
        await _answer(self._handle.forget.remote(groups))

    async def hold(self) -> None:  # noqa: D102
        await _answer(self._handle.hold.remote())

    async def idle(self) -> None:  # noqa: D102
        await _answer(self._handle.idle.remote())

    async def cut(self, servers: Sequence[ServerEndpoint]) -> None:  # noqa: D102
        await _answer(self._handle.cut.remote(servers))

    async def release(self) -> None:  # noqa: D102
        await _answer(self._handle.release.remote())

    async def write(self, step: int, groups: Collection[int]) -> None:  # noqa: D102
        await _answer(self._handle.write.remote(step, groups))

    async def evaluate(self, rows: Sequence[int], step: int) -> EvalFacts:  # noqa: D102
        facts: EvalFacts = await _answer(self._handle.evaluate.remote(rows, step))
        return facts


async def _answer(call: Awaitable[Any]) -> Any:
    """What a collector answers. Raises LinkLostError where it has died, and the MegarlError that it raised itself."""
    try:
        return await call
    except RayTaskError as error:
        if isinstance(error.cause, MegarlError):
            raise error.cause from None
        raise
    except RayActorError as error:
        raise LinkLostError(str(error).splitlines()[0]) from error
