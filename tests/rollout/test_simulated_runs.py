"""Whole runs of the real coordinator under a virtual clock, with random latencies, syncs, deaths and stops.

What has to hold of every one: nothing is lost or doubled, nothing too old is trained on, and the run ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.support.rollout_simulation import Driver, FakeCollector, Took, World, make_recipe
from bench.support.virtual_time import DeadlockError, run_virtual
from megarl.data.cursor import Cursor
from megarl.recipe.algorithm import KeepGroups
from megarl.recipe.schema import Recipe
from megarl.rollout.batcher import is_kept
from megarl.rollout.coordinator import Coordinator
from megarl.rollout.ledger import Event, Ledger
from megarl.rollout.local_advantages import StepPlan
from megarl.rollout.producer import Pace

LONGEST = 64
Key = tuple[int, int, int]  # row, step and first sample: what a group is called over stops and deaths


@dataclass(frozen=True)
class Case:
    """A run. stops: after which steps it is stopped and goes on as a new one.

    deaths: of collectors as they come: the call that kills it and whether it is done, or after how many seconds it dies.
    """

    prompts: int = 3
    samples: int = 2
    steps: int = 5
    rows: int = 30
    max_staleness: int = 0
    oversample: float = 1.0
    beside: bool = True
    in_flight: str = "abort"
    late: str = "wait"
    refill: int = 0
    keep: dict[str, float] | None = None
    collectors: int = 1
    deaths: tuple[tuple[int, bool] | float, ...] = ()
    stops: frozenset[int] = frozenset()
    train_s: float = 0.5
    world: World = field(default_factory=World)

    def recipe(self) -> Recipe:
        algorithm: dict[str, Any] = (
            {"drop_zero_variance_groups": True, "refill_rounds": self.refill} if self.refill else {}
        )
        if self.keep is not None:
            algorithm["keep_groups"] = self.keep
        rollout = {
            "max_staleness": self.max_staleness,
            "oversample": self.oversample,
            "in_flight": self.in_flight,
            "late": self.late,
        }
        return make_recipe(
            prompts=self.prompts,
            samples=self.samples,
            steps=self.steps,
            longest=LONGEST,
            rollout=rollout,
            algorithm=algorithm,
            data={"train": "t", "shuffle": True},
            reward={"max_failed_share": 1.0},
        )


@pytest.fixture(scope="module", autouse=True)
def _deaths_are_not_logged() -> Iterator[None]:
    links = logging.getLogger("megarl.rollout.links")
    links.disabled = True
    yield
    links.disabled = False


@st.composite
def cases(draw: st.DrawFn) -> Case:
    beside = draw(st.booleans())
    collectors = draw(st.integers(1, 3))
    death = st.one_of(st.tuples(st.integers(1, 25), st.booleans()), st.floats(0.01, 5.0))
    return Case(
        prompts=draw(st.integers(1, 5)),
        samples=draw(st.integers(1, 3)),
        steps=draw(st.integers(1, 7)),
        rows=draw(st.sampled_from([2, 7, 40])),
        max_staleness=draw(st.integers(0, 3)),
        oversample=draw(st.sampled_from([1.0, 1.25, 2.0])),
        beside=beside,
        in_flight=draw(st.sampled_from(["abort", "finish", "in_place"])),
        late=draw(st.sampled_from(["wait", "drop", "resume"])),
        refill=(refill := draw(st.integers(0, 2))),
        keep=draw(st.sampled_from([None, {"above": 0.4}])) if refill else None,
        collectors=collectors,
        deaths=tuple(draw(st.lists(death, max_size=4))),
        stops=draw(st.frozensets(st.integers(1, 6), max_size=2)),
        train_s=draw(st.sampled_from([0.01, 0.3, 3.0])),
        world=World(
            slots=draw(st.integers(1, 4)),
            mean_tokens=draw(st.sampled_from([2.0, 20.0])),
            sigma=draw(st.sampled_from([0.0, 1.0, 2.0])),
            longest=LONGEST,
            failed=draw(st.sampled_from([0.0, 0.2])),
            dull=draw(st.sampled_from([0.0, 0.5])),
            call_s=draw(st.sampled_from([0.0, 0.05, 1.0])),
            seed=draw(st.integers(0, 1000)),
        ),
    )


class WatchedLedger(Ledger):
    """Says no as soon as more groups wait than may."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._most = most

    def apply(self, event: Event) -> None:
        super().apply(event)
        self.events.append(event)
        self.check_balance()
        assert self.waiting() <= self._most, f"{event}: {self.waiting()} groups wait, and {self._most} may"
        assert sum(self.ages("running").values()) == self.num("running")
        assert sum(self.ages("finished").values()) == self.num("finished")


@dataclass
class Seen:
    """took: in the order of the steps. asked: groups, by their names, with how often. left: under way at the end."""

    took: list[Took]
    asked: Counter[Key]
    dropped: int = 0
    left: list[Key] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    seconds: float = 0.0


async def drive(case: Case) -> Seen:
    """The run, stopped and resumed as the case says."""
    recipe, deaths = case.recipe(), list(case.deaths)
    pace = Pace.of(recipe, beside=case.beside)
    seen = Seen([], Counter())
    state: Any = None
    version = 0

    def make(world: World, _: int) -> FakeCollector:
        death = deaths.pop() if deaths else None
        if isinstance(death, tuple):
            return FakeCollector(world, dies_at=death[0], dies_after=death[1])
        return FakeCollector(world, dies_in_s=death)

    step = 1
    while step <= case.steps:
        driver = Driver(
            recipe,
            case.world,
            rows=case.rows,
            beside=case.beside,
            collectors=case.collectors,
            train_s=case.train_s,
            make=make,
        )
        ledger = WatchedLedger(pace.groups_per_step + pace.ahead)
        driver.coordinator.ledger = ledger
        if state is not None:
            driver.coordinator.load_state(state)
        await driver.start(version)
        while step <= case.steps:
            seen.took.append(await driver.step(step))
            step += 1
            if step - 1 in case.stops:
                break
        state, version = driver.coordinator.state(), driver.version
        await driver.close()
        for event in ledger.events:
            if type(event).__name__ == "Admitted":
                seen.asked[event.row, event.step, event.first] += 1
        seen.dropped += ledger.dropped.total()
        seen.events += ledger.events
    seen.left = [tuple(each) for each in state["waiting"]]
    seen.seconds = asyncio.get_running_loop().time()
    return seen


# Of a step that is made once more a collector dies, with a group that had taught nothing and is made anew, and teaches nothing.
TWICE = Case(
    prompts=2,
    steps=2,
    rows=2,
    max_staleness=1,
    oversample=2.0,
    beside=False,
    refill=1,
    collectors=3,
    deaths=(2.0, 4.0, (13, False)),
    train_s=0.01,
    world=World(
        slots=1, mean_tokens=2.0, sigma=1.0, longest=64, token_s=0.01, failed=0.0, dull=0.0, call_s=1.0, seed=2
    ),
)


@settings(max_examples=120)
@example(case=TWICE)
@given(case=cases())
def test_every_run_ends_with_nothing_lost_doubled_or_too_old(case: Case) -> None:
    seen = run_virtual(drive(case))
    assert [took.step for took in seen.took] == list(range(1, case.steps + 1))
    trained = Counter(key for took in seen.took for key in took.taken)
    assert set(trained.values()) <= {1}, "a group is trained on twice"
    assert not trained.keys() & set(seen.left), "a group is trained on, and under way"
    assert len(set(seen.left)) == len(seen.left)
    assert len(seen.asked) == len(trained) + len(seen.left) + seen.dropped, "a group is lost, or two have the same name"
    for took in seen.took:
        assert len(took.taken) == case.prompts, "a step lacks groups"
        oldest = took.version - case.max_staleness
        info, parts = took.plan.info, took.plan.parts
        assert info.num_samples == len(took.spans) == sum(len(part.samples) for part in parts)
        for spans in took.spans:
            if case.late != "resume":
                assert all(oldest <= span.version <= took.version for span in spans)
            assert not spans or spans[-1].version >= oldest
        assert all(part.oldest == oldest for part in parts)
        assert sum(plan.positions.size for plan in took.plan.plans) == len(took.spans)


@settings(max_examples=25)
@given(case=cases())
def test_synchronous_steps_take_the_rows_in_their_order(case: Case) -> None:
    case = Case(**{**case.__dict__, "max_staleness": 0, "oversample": 1.0, "refill": 0})
    seen = run_virtual(drive(case))
    cursor = Cursor(case.rows, case.recipe().run.seed, shuffle=True, what="prompts")
    for took in seen.took:
        rows = cursor.take(case.prompts).tolist()
        again: Counter[int] = Counter()
        expected = []
        for row in rows:
            expected.append((row, took.step, again[row]))
            again[row] += case.samples
        assert list(took.taken) == expected
        assert all(span.version == took.version for spans in took.spans for span in spans)
    assert not seen.left


@settings(max_examples=10)
@given(case=cases())
def test_the_same_order_of_finishing_gives_the_same_steps(case: Case) -> None:
    first, second = run_virtual(drive(case)), run_virtual(drive(case))
    assert [took.taken for took in first.took] == [took.taken for took in second.took]
    assert [took.spans for took in first.took] == [took.spans for took in second.took]
    assert first.seconds == second.seconds


def test_lengths_and_stops_do_not_change_what_a_synchronous_run_trains_on() -> None:
    world = World(longest=LONGEST, mean_tokens=20.0)
    whole = run_virtual(drive(Case(world=world)))
    parts = run_virtual(drive(Case(world=world, stops=frozenset({1, 2, 4}), collectors=3)))
    assert [took.taken for took in whole.took] == [took.taken for took in parts.took]


@pytest.mark.parametrize("keep", [None, {"below": 0.6}])
@pytest.mark.parametrize(("max_staleness", "oversample"), [(0, 1.0), (2, 1.0), (1, 2.0)])
def test_a_step_that_trains_on_groups_that_are_not_kept_has_replaced_as_many_as_it_may(
    max_staleness: int, oversample: float, keep: dict[str, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Coordinator.next
    unused: list[int] = []
    kept = None if keep is None else KeepGroups(**keep)

    async def watched(self: Coordinator, step: int, version: int) -> StepPlan:
        plan = await plain(self, step, version)
        if not all(entry.facts and is_kept(entry.facts, kept) for entry in self.ledger.taken(step)):
            unused.append(self._refills._left)
        return plan

    monkeypatch.setattr(Coordinator, "next", watched)
    rollout: dict[str, Any] = {"max_staleness": max_staleness, "oversample": oversample, "beside": oversample == 1.0}
    world = World(slots=4, longest=LONGEST, mean_tokens=20.0, dull=0.6, seed=3)
    case = Case(prompts=4, samples=4, steps=10, rows=400, refill=1, keep=keep, train_s=3.0, world=world, **rollout)
    run_virtual(drive(case))
    assert unused and not any(unused)


def test_what_ranks_train_on_is_made_while_they_train() -> None:
    world = World(slots=12, longest=LONGEST, mean_tokens=30.0, sigma=0.5)
    seconds = {
        staleness: run_virtual(drive(Case(max_staleness=staleness, steps=12, rows=100, world=world))).seconds
        for staleness in (0, 1)
    }
    assert seconds[1] < 0.75 * seconds[0]


def test_waiting_for_ever_is_found() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match="nothing is due"):
        run_virtual(never())


def test_virtual_hours_pass_at_once_and_in_their_order() -> None:
    async def sleepers() -> list[int]:
        woken: list[int] = []

        async def sleep(hours: int) -> None:
            await asyncio.sleep(3600 * hours)
            woken.append(hours)

        await asyncio.gather(*map(sleep, (3, 1, 2)))
        assert asyncio.get_running_loop().time() == pytest.approx(3 * 3600)
        return woken

    assert run_virtual(sleepers()) == [1, 2, 3]
