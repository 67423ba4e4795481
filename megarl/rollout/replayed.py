"""A collector that asks nobody: its groups are those of a journal, as they were written down. What the journal lacks is told."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from megarl.core.errors import MegarlError
from megarl.core.types import Block, FloatArray, Sample
from megarl.data.chat import load_tokenizer
from megarl.data.prompts import PromptSet, load_prompts
from megarl.models.hf_config import load_model_config
from megarl.models.recipe_vision import sight_of
from megarl.recipe.schema import Recipe
from megarl.recipe.scoring import served_columns
from megarl.rollout import filters
from megarl.rollout.batcher import Part
from megarl.rollout.facts import GroupFacts
from megarl.rollout.handed import blocks_of, columns_of
from megarl.rollout.journal import Journal
from megarl.rollout.notices import Notices
from megarl.rollout.pictures import Pictures
from megarl.rollout.probe import Probe
from megarl.rollout.sample_facts import group_facts
from megarl.rollout.tasks import DataFacts, EvalFacts, GroupTask, Load, News
from megarl.rollout.turns import by_turn
from megarl.serving.client import ServerEndpoint


class ReplayCollector:
    """Reads groups; hands over what a step takes of them. It has no requests, so that nothing can be held or cut off."""

    def __init__(
        self,
        journal: Path,
        prompts: PromptSet,
        facts: DataFacts | None = None,
        *,
        by_turn: bool = False,
        truncated: filters.Truncated = "learn",
        columns: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
        image_token: int | None = None,
    ) -> None:
        """journal: the folder. prompts: of the rows that it was written with. by_turn: whether turns are rewarded.

        truncated: algorithm.truncated. columns: that come with the samples (`served_columns`). image_token: of a model that
        sees images.
        """
        self._by_turn, self._truncated, self._columns, self._image_token = by_turn, truncated, columns, image_token
        self._journal, self._prompts = Journal(journal), prompts
        self._facts = facts or DataFacts(len(prompts), prompts.num_dropped, 0)
        self._groups: dict[int, list[Sample]] = {}
        self._reading: dict[int, asyncio.Task[None]] = {}
        self._read: asyncio.Queue[GroupFacts | int | BaseException] = asyncio.Queue()
        self.notices = Notices()

    @classmethod
    def open(cls, journal: Path, recipe: Recipe) -> ReplayCollector:
        """Read the recipe's data. Raises UserError where it cannot be used."""
        tokenizer = load_tokenizer(recipe.model.path, recipe.data.chat_template_kwargs)
        sight = sight_of(load_model_config(recipe.model.path), recipe.data)
        found = load_prompts(recipe.data.train, tokenizer, recipe.data, answered=recipe.agent is None, sight=sight)
        facts, truncated = DataFacts.of(found, recipe.data), recipe.algorithm.truncated
        columns = served_columns(recipe)
        return cls(
            journal,
            found,
            facts,
            by_turn=by_turn(recipe),
            truncated=truncated,
            columns=columns,
            image_token=sight.image_token if sight is not None else None,
        )

    async def start(self) -> DataFacts:
        """There is nothing to start."""
        return self._facts

    async def begin(self, tasks: Sequence[GroupTask]) -> None:
        """Begin to read these groups."""
        for task in tasks:
            reading = self._reading[task.group] = asyncio.create_task(self._find(task))
            reading.add_done_callback(self._ended)

    async def news(self) -> News:
        """Groups that were read since, or are not in the journal, once there is one. Raises what ended the reading of one."""
        return await News.of(self._read)

    async def load(self) -> Load:
        """No server works."""
        return Load(0.0, 0)

    async def cancel(self, groups: Collection[int]) -> None:
        """Stop reading these groups and forget what there is of them."""
        gone = [self._reading.pop(group) for group in groups if group in self._reading]
        for reading in gone:
            reading.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        await self.forget(groups)

    async def forget(self, groups: Collection[int]) -> None:
        """Groups that have been trained on."""
        for group in groups:
            self._groups.pop(group, None)
            self._reading.pop(group, None)

    async def hold(self) -> None:
        """Nothing is asked for."""

    async def idle(self) -> None:
        """Nothing is asked for."""

    async def cut(self, servers: Sequence[ServerEndpoint]) -> None:
        """Nothing is asked for."""

    async def release(self) -> None:
        """Nothing is asked for."""

    async def write(self, step: int, groups: Collection[int]) -> None:
        """The run that is replayed has written its samples."""

    async def evaluate(self, rows: Sequence[int], step: int) -> EvalFacts:
        """Raises MegarlError."""
        raise MegarlError("Nothing can be evaluated without servers.")

    async def probe(self) -> Probe:
        """Raises MegarlError."""
        raise MegarlError("No weight sync can be verified without servers.")

    async def part(self, part: Part) -> tuple[Block, ...]:
        """This collector's block of each shard of a step."""
        samples = [self._groups[group][at] for group, at in part.samples]
        return blocks_of(part, samples, by_turn=self._by_turn)

    async def columns(self, part: Part) -> tuple[FloatArray, ...]:
        """As of a collector. Raises MegarlError where the journal has none of it."""
        return columns_of(part, [self._groups[group][at] for group, at in part.samples], self._columns)

    async def close(self) -> None:
        """Stop reading."""
        await self.cancel(list(self._reading))
        await self._journal.close()

    async def _find(self, task: GroupTask) -> None:
        prompt = self._prompts.prompts[task.row]
        found = await self._journal.find(task, prompt)
        if found is None:
            self._read.put_nowait(task.group)
        else:
            await Pictures(prompt, self._image_token).put(found.samples)
            learned = self._groups[task.group] = filters.learned(found.samples, self._truncated)
            facts = group_facts(task.group, found.samples, found.greedy, recorded=True, learned=learned)
            self._read.put_nowait(facts)

    def _ended(self, reading: asyncio.Task[None]) -> None:
        if not reading.cancelled() and (error := reading.exception()) is not None:
            self._read.put_nowait(error)
