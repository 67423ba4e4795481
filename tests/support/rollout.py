"""A coordinator and its collectors in this process, asked as the driver asks them over Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.core.types import BatchInfo, Block, Column, EvalResult, FloatArray, Prompt, Shard, ShardPlan
from megarl.data.pack import assemble, join_columns, split_column
from megarl.data.prompts import PromptSet
from megarl.models.config import ModelConfig
from megarl.recipe.schema import Recipe
from megarl.recipe.scoring import served_columns
from megarl.rewards.combine import Graders
from megarl.rollout.attempt import Player
from megarl.rollout.collector import Collector
from megarl.rollout.coordinator import Coordinator
from megarl.rollout.local_advantages import LocalAdvantages, StepPlan, column_names
from megarl.rollout.probe import Probe
from megarl.rollout.replayed import ReplayCollector
from megarl.rollout.teacher import ServedTeacher
from megarl.serving.client import ServerClient, ServerEndpoint


@dataclass(frozen=True)
class Learned:
    """columns: by name, one a shard."""

    columns: dict[str, list[Column]]
    metrics: dict[str, float]


class LocalRollout:
    """Generation with all of its processes in this one. beside: servers work while the ranks train."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        model: ModelConfig,
        prompts: PromptSet,
        eval_prompts: Sequence[Prompt] = (),
        server: ServerEndpoint,
        num_shards: int = 1,
        num_collectors: int = 1,
        beside: bool = False,
        graders: type[Graders] = Graders,
        client: Any = None,
        player: Player | None = None,
        replay: Path | None = None,
        teacher: ServerEndpoint | None = None,
        image_token: int | None = None,
    ) -> None:
        """teacher: where the recipe's teacher is served. image_token: of prompts that have images."""
        self.recipe, self._model, self._num_shards, self._beside = recipe, model, num_shards, beside

        self._replay = replay

        def collector() -> Collector | ReplayCollector:
            if replay is not None:
                return ReplayCollector(replay, prompts, columns=served_columns(recipe), image_token=image_token)
            return Collector(
                recipe,
                prompts=prompts,
                eval_prompts=eval_prompts,
                client=client or ServerClient(server, backoff_s=0.001, attempts=5),
                graders=graders.open(recipe.reward),
                decode=lambda ids: " ".join(map(str, ids)),
                player=player,
                num_collectors=num_collectors,
                teacher=None
                if teacher is None
                else ServedTeacher([ServerClient(teacher)], served_columns(recipe), 128, print),
                image_token=image_token,
            )

        self._collector = collector
        self.collectors = [collector() for _ in range(num_collectors)]
        self._turns = [LocalAdvantages(recipe) for _ in self.collectors]
        self.coordinator: Any = None
        self._plan: StepPlan | None = None
        self._blocks: list[tuple[Block, ...]] = []
        self._said: list[tuple[FloatArray, ...]] = []

    async def start(self) -> None:
        """Start the graders and the coordinator."""
        data = [await collector.start() for collector in self.collectors]
        self.coordinator = Coordinator(
            self.recipe,
            self.collectors,
            data[0],
            model=self._model,
            num_shards=self._num_shards,
            beside=self._beside,
            replay=self._replay,
        )

    async def close(self) -> None:
        """End everything; the book has to add up."""
        await self.coordinator.close()
        for collector in self.collectors:
            await collector.close()

    async def replace(self, owner: int) -> None:
        """A new collector in the place of one that has died."""
        old, new = self.collectors[owner], self._collector()
        await new.start()
        self.collectors[owner] = new
        await self.coordinator.replace(owner, new)
        await old.close()

    async def generate(self, step: int, version: int) -> tuple[list[Shard], BatchInfo]:
        """A step's shards, as the ranks put them together."""
        await self.coordinator.release(version)  # a weight sync comes before each step
        self._plan = plan = await self.coordinator.next(step, version)
        parts = list(zip(self.collectors, plan.parts, strict=True))
        self._blocks = [await collector.part(part) for collector, part in parts]
        self._said = [await collector.columns(part) for collector, part in parts]
        return [assemble(each, blocks) for each, blocks in zip(plan.plans, self._by_shard(), strict=True)], plan.info

    async def columns(self) -> dict[str, list[Column]]:
        """The columns that came with the step's samples, by name one a shard, as the ranks put them together."""
        plans = self._plan.plans if self._plan else ()
        return {
            name: [
                join_columns(each, blocks, [said[at * len(plans) + shard] for said in self._said])
                for shard, (each, blocks) in enumerate(zip(plans, self._by_shard(), strict=True))
            ]
            for at, name in enumerate(served_columns(self.recipe))
        }

    def advantages(self, step: int, columns: Mapping[str, Sequence[Column]]) -> Learned:
        """What the update learns from. columns: by name, one a shard."""
        assert self._plan is not None
        plan = self._plan
        flat = {
            name: [
                split_column(column, [each], [blocks])[0]
                for column, each, blocks in zip(parts, plan.plans, self._by_shard(), strict=True)
            ]
            for name, parts in columns.items()
        }
        measured = [
            turn.measure(
                plan.numbers[owner],
                self._blocks[owner],
                {name: [shard[owner] for shard in parts] for name, parts in flat.items()},
            )
            for owner, turn in enumerate(self._turns)
        ]
        settled = self.coordinator.settle(step, measured)
        learned = [turn.finish(each) for turn, each in zip(self._turns, settled, strict=True)]
        metrics = self.coordinator.advantages.metrics(measured, [each.sums for each in learned])
        made = {
            name: [
                join_columns(each, blocks, [part.columns[name][shard] for part in learned])
                for shard, (each, blocks) in enumerate(zip(plan.plans, self._by_shard(), strict=True))
            ]
            for name in column_names(self.recipe)
        }
        return Learned(made, metrics)

    async def probe(self) -> Probe:
        """What a weight sync is verified on."""
        return await self.collectors[0].probe()

    async def evaluate(self, step: int, version: int) -> EvalResult:
        """Held-out answers, graded."""
        await self.coordinator.release(version)
        result: EvalResult = await self.coordinator.evaluate(step, version)
        return result

    def _by_shard(self) -> list[tuple[Block, ...]]:
        plans: tuple[ShardPlan, ...] = self._plan.plans if self._plan else ()
        return [tuple(blocks[shard] for blocks in self._blocks) for shard in range(len(plans))]
