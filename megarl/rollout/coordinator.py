"""Keeps groups in flight at the collectors and makes steps of those that are finished. Numbers only: no token comes here.

What to admit and what to take are decisions of producer.py, from the ledger; how a step is assigned is batcher.py's. This
is the shell around them: it waits, tells collectors, and counts. It knows neither Ray nor servers, so that it runs the same
under a simulated clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from megarl.core.errors import MegarlError, UnusableError
from megarl.core.progress import Progress
from megarl.core.types import EvalResult
from megarl.models.config import ModelConfig
from megarl.recipe.schema import Recipe
from megarl.rollout import held_out, step_metrics
from megarl.rollout import ledger as events
from megarl.rollout.batcher import StepSamples
from megarl.rollout.decisions import Decision, Decisions
from megarl.rollout.facts import GroupFacts
from megarl.rollout.flow import Flow
from megarl.rollout.intake import Intake
from megarl.rollout.journal import JOURNAL
from megarl.rollout.ledger import Entry, Key, Ledger, keys_of
from megarl.rollout.links import CollectorLink, Links
from megarl.rollout.local_advantages import Measured, Settled, StepPlan
from megarl.rollout.producer import Choice, Pace, choose, owner_of, room
from megarl.rollout.refills import Refills
from megarl.rollout.rewinds import Rewinds
from megarl.rollout.step_advantages import StepAdvantages, StepFacts
from megarl.rollout.step_plan import StepPlanner
from megarl.rollout.tasks import DataFacts, GroupTask, News
from megarl.serving.client import ServerEndpoint


class Coordinator:
    """The ledger of a run, and what acts on it. One step at a time; groups of later steps meanwhile."""

    def __init__(
        self,
        recipe: Recipe,
        links: Sequence[CollectorLink],
        data: DataFacts,
        *,
        model: ModelConfig,
        num_shards: int,
        beside: bool,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.monotonic,
        replay: Path | None = None,
    ) -> None:
        """replay: the journal of another run, whose steps are made again, and no others."""
        self._recipe, self._data, self._beside = recipe, data, beside
        self._pace = Pace.of(recipe, beside=beside)
        self._progress = progress or Progress(None)
        self.ledger = Ledger()
        self._links = Links(links, self._told, self._lost, self._fault)
        self._gone: set[int] = set()  # groups of a step that has them, whose samples died with their collector
        self._intake = Intake.of(recipe, data)
        self._lengths: dict[int, float] = {}  # row -> tokens of a response, of its last group
        self._changed, self._behind = asyncio.Event(), asyncio.Event()  # behind: something has to be asked for
        self._trouble: BaseException | None = None
        self._step, self._version, self._collecting = 0, 0, False
        self._renewed = False  # whether the weights of the next step are there, and that has not begun
        self._undecided: list[int] = []  # finished, and nobody has looked yet whether they teach anything
        self.samples: StepSamples | None = None  # of the step that was given last
        self._refills, self._flow = Refills(self._pace.refills, recipe.algorithm.keep_groups), Flow(len(links), clock)
        self.advantages = StepAdvantages(recipe)
        self._planner = StepPlanner(recipe, model, self._pace, self.advantages, len(links), num_shards)
        self._asked_as: dict[Key, int] = {}  # numbers of groups that were asked for in an earlier life as well
        journal = replay or (recipe.run.folder / JOURNAL if recipe.train.journal else None)
        self.decisions = Decisions(journal, replays=replay is not None)
        self._missing: set[int] = set()  # groups that the journal was to have, and has not
        self._trains = 0  # version of the weights that the last step was made for
        self._rewinds = Rewinds(recipe)

    async def next(self, step: int, version: int) -> StepPlan:
        """The groups of a step, once there are enough: assigned, and counted. version: of the weights that it trains.

        Asked again for the step that it gave last, it makes it again of what is left.
        Raises MegarlError where no sample can be trained on, or where tokens came from other weights.
        """
        while True:
            before = self.ledger.taken(step)
            again = [entry for entry in before if entry.asked.group in self._gone]
            self._gone.clear()
            self._step, self._version, self._trains = step, version, version
            self._collecting, self._renewed = True, False
            self._refills.begin(step)  # also for groups that came when the step before had replaced its last
            self._undecided = [entry.asked.group for entry in self.ledger.finished()]
            self.ledger.apply(events.Returned(step))
            await self._anew(again)  # before all else: those that are returned could be lost meanwhile
            await self._commit(before=step)
            if before:
                self.decisions.make_again(step)
                await self._links.release()  # they were held once the step was made
            each = self._recipe.rollout.samples_per_prompt
            with self._progress.of(each * self._pace.groups_per_step, "samples"):
                self._progress.advance(self.ledger.num("finished") * each)
                await self._collect()
            entries = self.ledger.taken(step)
            if not self._beside:
                await self._links.hold()
            await self._admit()
            plan = await self._plan(entries, version)
            if self._gone.isdisjoint(entry.asked.group for entry in entries):
                self._refills.given()
                return plan

    @property
    def repeating(self) -> bool:
        """Whether steps are known that were made before the run was stopped: they need no server."""
        return self.decisions.repeating

    async def behind(self) -> None:
        """Returns once servers are needed: what is known of earlier steps has been made again."""
        await self._behind.wait()

    async def hold(self) -> None:
        """No further request begins until `release`."""
        await self._links.hold()

    async def idle(self) -> None:
        """Returns once no collector has a request at the servers."""
        await self._links.everyone(lambda link: link.idle())

    async def cut(self, servers: Sequence[ServerEndpoint]) -> None:
        """End the requests that run at these servers; what there is of them goes on after `release`."""
        await self._links.cut(servers)

    async def release(self, version: int) -> None:
        """Requests begin again; the servers have weights of this version."""
        self._version = version
        # What comes before the next step, an evaluation or a checkpoint, need not keep servers waiting for its groups.
        self._renewed = self._beside and self._pace.ahead > 0 and version > self._trains
        await self._links.release()
        await self._admit()

    async def evaluate(self, step: int, version: int) -> EvalResult:
        """Answer and grade the held-out prompts; every collector its share. Raises MegarlError where there are none."""
        if not self._data.eval_rows:
            raise MegarlError("There is nothing to evaluate on: the recipe has no data.eval.")
        facts = await self._links.evaluate(range(self._data.eval_rows), step)
        return held_out.result(facts, self._recipe, step, version)

    def settle(self, step: int, measured: Sequence[Measured]) -> list[Settled]:
        """The second turn of a step's advantages, for each collector: see StepAdvantages. Again for the same step: anew."""
        if self.samples is None or self.samples.step != step:
            made = "none has been made" if self.samples is None else f"the samples are of step {self.samples.step}"
            raise MegarlError(f"Advantages of step {step} were asked for; {made}.")
        return self.advantages.settle(StepFacts.of(self.samples), measured)

    async def replace(self, owner: int, link: CollectorLink | None) -> None:
        """A collector has died: its groups are made anew. link: to the one in its place; None while that is to come."""
        self._flow.forget(owner)
        await (self._links.died(owner) if link is None else self._links.replace(owner, link))

    async def close(self) -> None:
        """Listen no more. Raises LedgerError where the book does not add up."""
        await self._links.close()
        await self.decisions.close()
        self.ledger.check_balance()

    def state(self) -> dict[str, Any]:
        """The place in the data, the groups asked for and not trained on, and the weight of the KL."""
        waiting = keys_of(entry for entry in self.ledger.under_way() if entry.phase != "taken")
        place = {**self._intake.state(waiting), **self.advantages.state()}
        return {**place, "step": self._step, "decisions": self.decisions.last, "rewinds": self._rewinds.total}

    async def rewind(self, to_step: int, to_number: int) -> bool:
        """Write down that the run goes back to a checkpoint, of this newest decision; whether not too often."""
        if not self._rewinds.may(to_step):
            return False
        self.decisions.leave(f"step {self._step} is gone back over", self._step)
        self.decisions.add("rewound", to_step, [(to_number, 0, 0)])
        await self.decisions.write()
        return True

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved place: what was decided since is decided again; what was under way then is asked for first."""
        self._intake.load_state(state)
        self.advantages.load_state(state)
        self._step = int(state.get("step", self._step))
        self._rewinds.total = int(state.get("rewinds", 0))
        self.decisions.resume(state.get("decisions"), state.get("waiting", ()))

    async def _collect(self) -> None:
        """Take the groups of the step, once they are there."""
        if await self._repeat():
            return None
        self._behind.set()
        await self._refill()
        while True:
            await self._admit()
            choice = Choice() if self._links.looks_up else choose(self.ledger, self._pace, self._version)
            if choice.groups:
                # In one go with the choice: a moment later a collector may have died with some of them.
                self._take(choice.groups)
                self.decisions.add("taken", self._step, self.ledger.keys(choice.groups))
                self.decisions.add("late", self._step, self.ledger.keys(choice.drop))
                await self.decisions.write()
                return await self._drop(choice.drop, "late")
            await self._change()

    def _take(self, groups: Sequence[int]) -> None:
        self.ledger.apply(events.Taken(self._step, tuple(groups)))
        self._collecting = False

    async def _repeat(self) -> bool:
        """Decide as before the run was stopped, as far as that is known; whether the step has what it took then."""
        while self.decisions.repeating and (key := self._intake.again()) is not None:
            self._ask(key, recorded=True)  # what was under way even before
        while (decision := self.decisions.again(self._step)) is not None:
            if decision.kind == "admitted":
                for key in decision.groups:
                    self._ask(self._intake.repeat(key), recorded=True)
                continue
            await self._links.flush()
            if decision.kind == "rewound":
                await self._pass_over(decision)
                continue
            groups = [self._asked_as[key] for key in decision.groups]
            if decision.kind == "late":
                await self._drop(groups, "late")
                continue
            facts = [await self._finished(group) for group in groups]
            anew = not all(each.recorded for each in facts)
            if decision.kind == "taken":
                self._take(groups)
            elif anew:  # they may teach something now
                self.decisions.take_back(decision)
            else:
                self._refills.again(decision.groups, facts)
                await self._drop(groups, self._refills.why)
            if anew:
                self.decisions.leave(f"samples of step {self._step} were made anew", self._step)
            if decision.kind == "taken":
                return True
        self.decisions.leave(f"what step {self._step} took is not known", self._step)
        return False

    async def _pass_over(self, decision: Decision) -> None:
        """Go on with the data behind all that was asked for before the run went back."""
        self._rewinds.passed(decision)
        await self._drop([entry.asked.group for entry in self.ledger.under_way() if entry.phase != "taken"], "rewound")
        for key in decision.groups:
            self._intake.repeat(key)

    async def _finished(self, group: int) -> GroupFacts:
        """A group that is under way, once it has finished."""
        while (entry := self.ledger.get(group)) is None or entry.facts is None:
            if group in self._missing:
                self.decisions.lacks(f"a group that step {self._step} had is not in it, or damaged")
                self._behind.set()
            await self._change()
        return entry.facts

    async def _change(self) -> None:
        """Wait until something has finished, or died."""
        self._changed.clear()
        if self._trouble is None:
            await self._changed.wait()
        if self._trouble is not None:
            raise self._trouble

    async def _admit(self) -> None:
        """Ask for as many groups as there is room for; for none while it is known what was asked for."""
        if self.decisions.repeating:
            return
        steps = max(self._collecting, self._recipe.train.steps - self._step + self._collecting)
        left = steps * self._pace.groups_per_step  # what no step would train on is not asked for
        collecting = self._collecting or self._renewed
        while room(self.ledger, self._pace, collecting=collecting) and self.ledger.waiting() < left:
            again = self._intake.again()
            key = again or self._intake.next(self._meant_for())
            self._ask(key, recorded=again is not None)
            self.decisions.add("admitted", self._step, [] if again else [key])
        await self.decisions.write()
        await self._links.flush()

    def _ask(self, key: Key, *, recorded: bool) -> None:
        owner, number = self._owner(), self.ledger.admitted
        self.ledger.apply(events.Admitted(number, *key, self._version, owner))
        if recorded:
            self._asked_as[key] = number
        self._post(owner, number, key, recorded=recorded)

    def _post(self, owner: int, group: int, key: Key, *, recorded: bool) -> None:
        expected = self._lengths.get(key[0], 0.0) if self._recipe.rollout.longest_first else 0.0
        count, greedy = self._recipe.rollout.samples_per_prompt, self.advantages.needs_greedy
        self._flow.begins()
        recorded = recorded and self.decisions.last is not None  # else there is no journal
        self._links.post(owner, GroupTask(group, *key, count, greedy, expected, recorded))

    def _meant_for(self) -> int:
        """The step that the next group would be trained in if groups finished in their order."""
        behind = self.ledger.waiting() // self._pace.groups_per_step if self._beside else 0
        return self._step + (0 if self._collecting else 1) + behind

    def _owner(self) -> int:
        """Which collector the next group goes to; where all have died, those that come in their place share them."""
        living = self._links.living() or range(len(self._links))
        return living[owner_of([self.ledger.load(owner) for owner in living])]

    async def _told(self, owner: int, news: News) -> None:
        """Take in what a collector has to tell."""
        self._missing.update(news.missing)
        for facts in news.finished:
            entry = self.ledger.get(facts.group)
            if entry is None or entry.phase != "running" or entry.asked.owner != owner:
                continue  # it has been dropped meanwhile
            self._finish(entry, facts)
            self._undecided.append(facts.group)
        self._changed.set()
        if not self.decisions.repeating:
            await self._refill()

    async def _refill(self) -> None:
        """Ask for others in the place of groups that have finished and teach nothing."""
        # One that was made anew behind its collector's death, in a step that is made once more, is there twice.
        finished, self._undecided = dict.fromkeys(self._undecided), []
        waiting = [entry for entry in map(self.ledger.get, finished) if entry is not None and entry.phase == "finished"]
        # Where a step takes all that it has asked for, who finishes first decides nothing of it.
        running = None if self._pace.ahead else [entry.asked.group for entry in self.ledger.running()]
        dull = self._refills.choose(waiting, running)
        self._undecided += self._refills.undecided
        if dull:
            self.decisions.add("dull", self._step, self.ledger.keys(dull))
            await self._drop(dull, self._refills.why)
            await self._admit()  # also while no step waits for them

    def _finish(self, entry: Entry, facts: GroupFacts) -> None:
        self.ledger.apply(events.Finished(facts))
        self._progress.advance(len(facts.rewards))
        self._flow.made(0 if facts.recorded else int(facts.response_tokens.sum()))
        if facts.usable.any():
            self._lengths[entry.asked.row] = float(facts.response_tokens[facts.usable].mean())
        if not self.ledger.num("running"):
            self._flow.ends()

    async def _drop(self, groups: Collection[int], why: str) -> None:
        owners: dict[int, list[int]] = {}
        for group in groups:
            entry = self.ledger.get(group)
            self.ledger.apply(events.Dropped(group, why))
            if entry is not None:
                owners.setdefault(entry.asked.owner, []).append(group)
        for owner, some in owners.items():
            await self._links.cancel(owner, some)

    async def _lost(self, owner: int) -> None:
        """A collector has died with its samples: what no step has taken is made anew, by those that live."""
        mine = [entry for entry in self.ledger.under_way() if entry.asked.owner == owner]
        self._gone.update(entry.asked.group for entry in mine if entry.phase == "taken")
        await self._anew([entry for entry in mine if entry.phase != "taken"])
        self._changed.set()

    async def _anew(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            owner, group = self._owner(), entry.asked.group
            self.ledger.apply(events.Lost(group, owner, self._version))
            self._post(owner, group, *keys_of([entry]), recorded=True)
        await self._links.flush()

    def _fault(self, error: BaseException) -> None:
        self._trouble = error
        self._changed.set()

    async def _commit(self, before: int) -> None:
        """Groups of earlier steps have been trained on."""
        done = [entry for entry in self.ledger.under_way() if entry.phase == "taken" and entry.step < before]
        for step in sorted({entry.step for entry in done}):
            self.ledger.apply(events.Committed(step))
        for owner in self._links.living():
            if mine := [entry.asked.group for entry in done if entry.asked.owner == owner]:
                await self._links.forget(owner, mine)
        self._gone -= {entry.asked.group for entry in done}
        self._intake.forget(before - 1)

    async def _plan(self, entries: Sequence[Entry], version: int) -> StepPlan:
        step, first = self._step, entries[0].asked.owner
        mine = [entry.asked.group for entry in entries if entry.asked.owner == first]
        await self._links.tell(first, lambda link: link.write(step, mine))
        metrics = self._flow.metrics(await self._links.loads(), self.decisions.spent_s) | self._rewinds.metrics()
        metrics |= step_metrics.place_metrics(self.ledger, self._data, self._intake.place())
        try:
            self.samples, plan = self._planner.plan(entries, step, version, self._refills.facts(), metrics)
        except UnusableError:  # whoever goes on, once that is mended, is not to meet it again
            left = [entry for entry in self.ledger.under_way() if entry.facts is None or entry.facts.flawed]
            await self._drop([entry.asked.group for entry in left], "refused")
            self.decisions.anew([*self._refills.flawed(), *keys_of(left)])
            raise
        return plan
