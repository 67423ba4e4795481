"""A run's rollout under a virtual clock: the real coordinator, and collectors whose servers only pretend to answer.

A fake collector has slots, each of which makes one response at a time, a token every so many seconds; lengths are drawn by
prompt, step and number, so that the same group has the same lengths wherever and whenever it is made. Weight syncs stop what
runs and let it go on with the new version, as the real ones do; collectors may die at any call, or between calls.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.core.types import VersionSpan
from megarl.models.config import ModelConfig, Rope
from megarl.recipe.schema import Recipe
from megarl.rollout.batcher import Part
from megarl.rollout.coordinator import Coordinator
from megarl.rollout.facts import GroupFacts
from megarl.rollout.links import LinkLostError
from megarl.rollout.local_advantages import StepPlan
from megarl.rollout.tasks import DataFacts, EvalFacts, GroupTask, Load, News
from megarl.serving.client import ServerEndpoint

MODEL = ModelConfig(
    family="simulated",
    architecture="simulated",
    num_layers=1,
    hidden_size=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    ffn_hidden_size=2,
    vocab_size=2,
    max_positions=2**20,
    rope=Rope(1e4),
    norm_eps=1e-6,
    tied_embeddings=False,
    qkv_bias=False,
    qk_norm=False,
    eos_token_ids=(),
)
PROMPT_TOKENS = 8


@dataclass(frozen=True)
class World:
    """What the pretended servers are like. slots: of one collector. mean_tokens, sigma: of the log-normal lengths.

    token_s: seconds a token. failed, dull: shares of samples that fail, and of groups whose rewards are all equal. call_s:
    most seconds that a call to a collector takes.
    """

    slots: int = 4
    mean_tokens: float = 32.0
    sigma: float = 1.0
    longest: int = 256
    token_s: float = 0.01
    failed: float = 0.0
    dull: float = 0.0
    call_s: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class _Response:
    """left: tokens to make. begun, ends: of what runs; None where it waits for a slot."""

    left: int
    spans: list[VersionSpan] = field(default_factory=list)
    begun: float = 0.0
    ends: float = 0.0
    runs: bool = False


@dataclass(slots=True)
class _Group:
    task: GroupTask
    responses: list[_Response]
    facts: GroupFacts | None = None


class FakeCollector:
    """A CollectorLink in virtual time. version: of the weights that its servers have, set by whoever syncs them.

    dies_at: the number of the call that kills it, before it has done anything or, where `dies_after`, when it has.
    dies_in_s: seconds until it dies of itself.
    """

    def __init__(
        self, world: World, *, dies_at: int | None = None, dies_after: bool = False, dies_in_s: float | None = None
    ) -> None:
        self.world, self.version = world, 0
        self.groups: dict[int, _Group] = {}
        self.dead = False
        self.on_death: Callable[[], None] = lambda: None
        self.asked: list[GroupTask] = []
        self._dies_at, self._dies_after, self._calls = dies_at, dies_after, 0
        self._loop = asyncio.get_running_loop()
        if dies_in_s is not None:
            self._loop.call_later(dies_in_s, self.die)
        self._random = np.random.default_rng((world.seed, 7))
        self._slots = [0.0] * world.slots
        self._held = False
        self._news: list[GroupFacts] = []
        self._told = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._due: list[tuple[float, int, _Group]] = []
        self._order = itertools.count()
        self._last = 0.0  # call that arrived
        self.busy_slot_s = 0.0

    def die(self) -> None:
        """From now on no call is answered."""
        if not self.dead:
            self.dead = True
            self._stop_timer()
            self._told.set()
            self.on_death()

    async def begin(self, tasks: Sequence[GroupTask]) -> None:
        """Longest expected first, as the gate lets them in."""
        await self._call(lambda: self._begin(tasks))

    async def news(self) -> News:
        """Once a group has finished. Not a call that kills: it is waiting nearly always."""
        while not self._news and not self.dead:
            self._told.clear()
            await self._told.wait()
        self._alive()
        told, self._news = self._news, []
        return News(told)

    async def load(self) -> Load:
        """Not a call that kills either."""
        self._alive()
        return Load(self.busy_slot_s / self.world.slots, 0)

    async def cancel(self, groups: Collection[int]) -> None:
        await self._call(lambda: self._cancel(groups))

    async def forget(self, groups: Collection[int]) -> None:
        await self._call(lambda: [self.groups.pop(group, None) for group in groups])

    async def hold(self) -> None:
        await self._call(self._hold)

    async def idle(self) -> None:
        await self._call(lambda: None)
        while not self.dead and (left := self._running_until() - self._loop.time()) > 0:
            await asyncio.sleep(left)
        self._alive()

    async def cut(self, servers: Sequence[ServerEndpoint]) -> None:
        await self._call(self.stop)

    async def release(self) -> None:
        await self._call(self.go_on)

    async def write(self, step: int, groups: Collection[int]) -> None:
        await self._call(lambda: None)

    async def evaluate(self, rows: Sequence[int], step: int) -> EvalFacts:
        await self._call(lambda: None)
        count = len(rows)
        await asyncio.sleep(count * self.world.token_s)
        self._alive()
        none = np.zeros(count, np.bool_)
        return EvalFacts(
            rows=np.array(rows, np.int64),
            rewards=np.ones(count, np.float32),
            scores=np.ones(count, np.float32),
            response_tokens=np.ones(count, np.int64),
            truncated=none,
            failed=none,
            ungraded=none,
            versions=(self.version, self.version),
        )

    def part(self, part: Part) -> list[tuple[VersionSpan, ...]]:
        """The spans of each sample of a step, as it is handed to the ranks. Raises LinkLostError, or KeyError without it."""
        self._alive()
        found = []
        for group, at in part.samples:
            facts = self.groups[group].facts
            assert facts is not None, f"group {group} is trained on before it has finished"
            found.append(facts.spans[at])
        return found

    def stop(self) -> None:
        """Stop everything where it is: a cut, or a pause in place."""
        self._settle(self._loop.time())
        self._held = True
        self._stop_timer()

    def set_version(self, version: int) -> None:
        """New weights: what has been made so far is of the old ones."""
        self._settle(self._loop.time())
        self.version = version

    def go_on(self) -> None:
        """Go on with what was stopped or held, with the version of now."""
        if self._held:
            self._held = False
            self._settle(self._loop.time())
            self._schedule([group for group in self.groups.values() if group.facts is None])

    async def _call(self, what: Callable[[], Any]) -> None:
        """A call: takes its time, and may be the one that kills."""
        self._calls += 1
        kills = self._calls == self._dies_at
        if self.world.call_s:  # calls arrive in their order
            now = self._loop.time()
            self._last = max(self._last + 1e-6, now + self._random.random() * self.world.call_s)
            await asyncio.sleep(self._last - now)
        if kills and not self._dies_after:
            self.die()
        self._alive()
        what()
        if kills:
            self.die()
            self._alive()

    def _alive(self) -> None:
        if self.dead:
            raise LinkLostError("it died")

    def _begin(self, tasks: Sequence[GroupTask]) -> None:
        made = []
        for task in sorted(tasks, key=lambda task: -task.expected_tokens):
            assert task.group not in self.groups, f"group {task.group} is begun twice"
            made.append(_Group(task, [_Response(length) for length in lengths_of(self.world, task)]))
            self.groups[task.group] = made[-1]
        self.asked += tasks
        if not self._held:
            self._schedule(made)

    def _schedule(self, groups: Sequence[_Group]) -> None:
        """Each waiting response to the slot that is free first; when they end is then known, unless a sync comes first."""
        now, slots, token_s = self._loop.time(), self._slots, self.world.token_s
        for group in groups:
            for each in group.responses:
                if each.left and not each.runs:
                    each.begun = max(now, slots[0])
                    each.ends = each.begun + each.left * token_s
                    each.runs = True
                    heapq.heapreplace(slots, each.ends)
            ends = max(now, *(each.ends for each in group.responses))
            heapq.heappush(self._due, (ends, next(self._order), group))
        self._set_timer()

    def _settle(self, now: float) -> None:
        """What has been made so far is made; nothing runs."""
        for group in self.groups.values():
            if group.facts is None:
                for each in group.responses:
                    self._make(each, now)
        self._slots = [now] * self.world.slots
        self._due.clear()

    def _make(self, each: _Response, now: float) -> None:
        if not each.runs:
            return
        made = each.left
        if each.ends > now:
            made = min(each.left - 1, int((now - each.begun) / self.world.token_s)) if each.begun < now else 0
        if made:
            self.busy_slot_s += made * self.world.token_s
            each.left -= made
            if each.spans and each.spans[-1].version == self.version:
                each.spans[-1] = each.spans[-1]._replace(end=each.spans[-1].end + made)
            else:
                start = each.spans[-1].end if each.spans else 0
                each.spans.append(VersionSpan(self.version, start, start + made))
        each.runs = False

    def _hold(self) -> None:
        """What waits for a slot goes on waiting; what runs ends."""
        if self._held:
            return
        now, self._held = self._loop.time(), True
        for group in self.groups.values():
            for each in group.responses:
                if each.runs and each.begun > now:
                    each.runs = False
        self._slots = [now] * self.world.slots
        # Those that wait for a slot come again when it is released; those that run to their end are told of when they are.
        ending = [entry for entry in self._due if all(each.runs or not each.left for each in entry[2].responses)]
        heapq.heapify(ending)
        self._due = ending
        self._set_timer()

    def _running_until(self) -> float:
        return max((each.ends for group in self.groups.values() for each in group.responses if each.runs), default=0.0)

    def _cancel(self, groups: Collection[int]) -> None:
        gone = [self.groups.pop(group) for group in groups if group in self.groups]
        if any(group.facts is None for group in gone) and not self._held:
            self.stop()
            self.go_on()

    def _set_timer(self) -> None:
        self._stop_timer()
        if self._due and not self.dead:
            self._timer = self._loop.call_at(self._due[0][0], self._finish)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _finish(self) -> None:
        """Groups whose last response has ended."""
        now = self._loop.time() + 1e-9
        while self._due and self._due[0][0] <= now:
            _, _, group = heapq.heappop(self._due)
            if group.facts is None and self.groups.get(group.task.group) is group:
                for each in group.responses:
                    self._make(each, each.ends)
                group.facts = facts_of(self.world, group.task, [tuple(each.spans) for each in group.responses])
                self._news.append(group.facts)
                self._told.set()
        self._set_timer()


def _draws(world: World, task: GroupTask, what: int) -> random.Random:
    return random.Random(hash((world.seed, task.row, task.step, task.first, what)))  # the same in every process


def lengths_of(world: World, task: GroupTask) -> list[int]:
    """Tokens of each response of a group."""
    mean = math.log(world.mean_tokens) - world.sigma**2 / 2
    draws = _draws(world, task, 0)
    return [min(world.longest, max(1, int(draws.lognormvariate(mean, world.sigma)))) for _ in range(task.count)]


def facts_of(world: World, task: GroupTask, spans: Sequence[tuple[VersionSpan, ...]]) -> GroupFacts:
    """What is told of a group whose responses were made by these versions."""
    draws, count = _draws(world, task, 1), task.count
    failed = np.array([draws.random() < world.failed for _ in range(count)])
    failed[0] = False  # a step has to have samples
    dull = draws.random() < world.dull
    rewards = np.array([0 if dull else draws.randrange(2) for _ in range(count)], np.float32)
    none = np.zeros(count, np.bool_)
    kept = tuple(() if bad else each for each, bad in zip(spans, failed, strict=True))
    tokens = np.array([each[-1].end if each else 0 for each in kept], np.int64)
    return GroupFacts(
        group=task.group,
        prompt_tokens=np.full(len(tokens), PROMPT_TOKENS),
        response_tokens=tokens,
        trained_tokens=tokens,
        rewards=rewards,
        mean_nll=np.ones(count, np.float32),
        usable=~failed,
        truncated=none,
        failed=failed,
        ungraded=none,
        spans=kept,
        failure="it failed" if failed.any() else "",
    )


def make_recipe(
    *, prompts: int, samples: int, steps: int, longest: int, rollout: Any = None, **sections: Any
) -> Recipe:
    """A recipe with these numbers, not checked."""
    sizes = {"prompts_per_step": prompts, "samples_per_prompt": samples, "max_response_tokens": longest}
    return Recipe.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "rollout": sizes | (rollout or {}),
            "actor": {"micro_batch_tokens": longest + PROMPT_TOKENS},
            "train": {"steps": steps, "journal": False},
            **sections,
        }
    )


@dataclass(frozen=True)
class Took:
    """A step that was trained on: its plan, and the version spans of its samples, in the order of the step."""

    step: int
    version: int
    plan: StepPlan
    spans: list[tuple[VersionSpan, ...]]
    taken: tuple[tuple[int, int, int], ...]  # row, step and first sample of each group, in the order of the step
    rollout_s: float


class Driver:
    """What drives a run: asks for steps, lets ranks train, syncs weights, replaces collectors that died."""

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        *,
        rows: int,
        beside: bool,
        collectors: int = 1,
        shards: int = 2,
        train_s: float = 1.0,
        sync_s: float = 0.1,
        restart_s: float = 1.0,
        make: Callable[[World, int], FakeCollector] | None = None,
    ) -> None:
        self.recipe, self.world, self.beside = recipe, world, beside
        self.train_s, self.sync_s, self.restart_s = train_s, sync_s, restart_s
        self._make = make or (lambda world, _: FakeCollector(world))
        self._loop = asyncio.get_running_loop()
        self._paused = False
        self._replacing: set[asyncio.Task[None]] = set()
        self._busy_of_dead = 0.0
        self.version = 0
        self.links = [self._made(owner, 0) for owner in range(collectors)]
        self.coordinator = Coordinator(
            recipe,
            list(self.links),
            DataFacts(rows, 0, 0),
            model=MODEL,
            num_shards=shards,
            beside=beside,
            clock=self._loop.time,
        )

    def _made(self, owner: int, number: int) -> FakeCollector:
        link = self._make(self.world, number)
        link.version = self.version
        link.on_death = lambda: self._died(owner, link, number)
        return link

    def _died(self, owner: int, link: FakeCollector, number: int) -> None:
        async def replace() -> None:
            await asyncio.sleep(self.restart_s)
            self.links[owner] = self._made(owner, number + 1)
            if self._paused:
                self.links[owner].stop()  # the servers are paused, whoever asks them
            await self.coordinator.replace(owner, self.links[owner])

        self._busy_of_dead += link.busy_slot_s
        task = asyncio.create_task(replace())
        self._replacing.add(task)
        task.add_done_callback(self._replaced)

    def _replaced(self, task: asyncio.Task[None]) -> None:
        self._replacing.discard(task)
        if not task.cancelled():
            task.result()

    @property
    def busy_slot_s(self) -> float:
        """Seconds that slots have made tokens for, over all collectors."""
        return self._busy_of_dead + sum(link.busy_slot_s for link in self.links)

    async def start(self, version: int = 0) -> None:
        """The first sync."""
        self._set_version(version)
        await self.coordinator.release(version)

    async def step(self, step: int) -> Took:
        """Samples, training, sync."""
        began = self._loop.time()
        while True:
            plan = await self.coordinator.next(step, self.version)
            try:
                spans = self._spans(plan)
                break
            except LinkLostError:
                await asyncio.sleep(self.restart_s / 2)
        rollout_s = self._loop.time() - began
        asked = [entry.asked for entry in self.coordinator.ledger.taken(step)]
        taken = tuple((each.row, each.step, each.first) for each in asked)
        took = Took(step, self.version, plan, spans, taken, rollout_s)
        if not self.beside:
            await self.coordinator.cut(())
        await asyncio.sleep(self.train_s)
        await self._sync()
        return took

    async def close(self) -> None:
        """The book has to add up."""
        for task in self._replacing:
            task.cancel()
        await self.coordinator.close()

    def _spans(self, plan: StepPlan) -> list[tuple[VersionSpan, ...]]:
        spans: dict[int, tuple[VersionSpan, ...]] = {}
        for link, part in zip(self.links, plan.parts, strict=True):
            if any(group not in link.groups for group in part.groups):
                raise LinkLostError("its samples are gone")
            for index, each in zip(part.indices.tolist(), link.part(part), strict=True):
                spans[index] = each
        return [spans[index] for index in range(len(spans))]

    async def _sync(self) -> None:
        coordinator, mode = self.coordinator, self.recipe.rollout.in_flight
        if self.beside and mode == "in_place":
            self._paused = True
            for link in self.links:
                link.stop()
        elif self.beside and mode == "finish":
            await coordinator.hold()
            await coordinator.idle()
        elif self.beside:
            await coordinator.cut(())
        await asyncio.sleep(self.sync_s)
        self._set_version(self.version + 1)
        if self._paused:
            self._paused = False
            for link in self.links:
                link.go_on()
        await coordinator.release(self.version)

    def _set_version(self, version: int) -> None:
        self.version = version
        for link in self.links:
            link.set_version(version)
