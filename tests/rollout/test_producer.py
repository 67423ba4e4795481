"""How many groups are asked for, and which a step takes: against all that could be taken, and by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.support.rollout_simulation import make_recipe
from megarl.rollout.ledger import Finished, Ledger
from megarl.rollout.producer import Choice, Pace, choose, owner_of, room
from tests.rollout.test_ledger import admitted, facts

Group = tuple[int, int | None]  # version, and its place in the order of finishing; None while it runs


def ledger_of(groups: list[Group]) -> Ledger:
    ledger = Ledger()
    for number, (version, _) in enumerate(groups):
        ledger.apply(admitted(number, version))
    done = [(at, number) for number, (_, at) in enumerate(groups) if at is not None]
    for _, number in sorted(done):
        ledger.apply(Finished(facts(number, groups[number][0])))
    return ledger


def can_go_on(deadlines: list[int], size: int) -> bool:
    """Whether steps of `size` groups from the next one on take each by its deadline: 1 is the next step."""
    steps = max(deadlines, default=0)
    slots = [step for step in range(1, steps + 1) for _ in range(size)]
    return (
        any(
            all(step <= deadline for step, deadline in zip(order, deadlines, strict=True))
            for order in itertools.islice(itertools.permutations(slots, len(deadlines)), 100_000)
        )
        if deadlines
        else True
    )


def schedulable(deadlines: list[int], size: int) -> bool:
    """The same by counting, which is what the brute force checks: no more have a deadline than steps until then take."""
    return all(sum(each <= by for each in deadlines) <= by * size for by in range(max(deadlines, default=0) + 1))


@settings(max_examples=60)
@given(deadlines=st.lists(st.integers(0, 3), max_size=4), size=st.integers(1, 2))
def test_counting_finds_what_trying_all_orders_finds(deadlines: list[int], size: int) -> None:
    assert schedulable(deadlines, size) == can_go_on(deadlines, size)


@st.composite
def books(draw: st.DrawFn) -> tuple[Pace, int, list[Group]]:
    """A step at version 10, and groups as admission lets them be: this step and those after it can take each in time."""
    staleness, size = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    most = (staleness + 1) * size
    versions = draw(st.lists(st.integers(10 - staleness, 10), min_size=1, max_size=min(most, 6)))
    order = draw(st.permutations(range(len(versions))))
    done = draw(st.lists(st.booleans(), min_size=len(versions), max_size=len(versions)))
    groups = [(version, at if ok else None) for version, at, ok in zip(versions, order, done, strict=True)]
    late = draw(st.sampled_from(["wait", "drop", "resume"]))
    return Pace(size, staleness, staleness * size, 0, late), 10, groups  # type: ignore[arg-type]


@settings(max_examples=300)
@given(book=books())
def test_a_step_takes_what_lets_all_others_be_taken_in_time(book: tuple[Pace, int, list[Group]]) -> None:
    pace, version, groups = book
    deadlines = [pace.max_staleness - (version - each) for each, _ in groups]
    late = {number for number, left in enumerate(deadlines) if left <= 0 and groups[number][1] is None}
    dropped = late if pace.late == "drop" and pace.max_staleness else set()
    finished = sorted((at, number) for number, (_, at) in enumerate(groups) if at is not None)
    size = min(pace.groups_per_step, len(groups))

    def others(chosen: tuple[int, ...]) -> list[int]:
        return [left for number, left in enumerate(deadlines) if number not in chosen and number not in dropped]

    # Of all that could be taken, those after which the rest can be taken in time, where that was so before.
    tries = list(itertools.combinations([number for _, number in finished], size))
    before = schedulable([left + 1 for left in others(())], pace.groups_per_step)
    good = [chosen for chosen in tries if pace.late == "resume" or schedulable(others(chosen), pace.groups_per_step)]
    choice = choose(ledger_of(groups), pace, version)
    if not before and pace.late != "resume":
        return  # no admission leads there
    if good:
        assert choice.groups in {tuple(sorted(chosen)) for chosen in good}
        assert set(choice.drop) == dropped
    else:
        assert choice == Choice()
    assert len(choice.groups) in (0, size)
    assert choice == choose(ledger_of(groups), pace, version)


def test_the_first_to_finish_go_first_where_nothing_is_due() -> None:
    pace = Pace(2, 1, 2)
    assert choose(ledger_of([(5, None), (5, 1), (5, 0), (5, 2)]), pace, 5).groups == (1, 2)


def test_what_is_due_goes_before_what_finished_first() -> None:
    pace = Pace(2, 1, 2)
    assert choose(ledger_of([(4, 3), (5, 0), (5, 1), (5, 2)]), pace, 5).groups == (0, 1)


def test_a_group_in_its_last_step_is_waited_for_dropped_or_resumed() -> None:
    groups: list[Group] = [(4, None), (5, 0), (5, 1)]
    assert choose(ledger_of(groups), Pace(2, 1, 2, late="wait"), 5) == Choice()
    assert choose(ledger_of(groups), Pace(2, 1, 2, late="drop"), 5) == Choice((1, 2), (0,))
    assert choose(ledger_of(groups), Pace(2, 1, 2, late="resume"), 5) == Choice((1, 2))


def test_nothing_is_dropped_while_the_step_has_to_wait_anyway() -> None:
    # It may yet finish in time.
    assert choose(ledger_of([(4, None), (5, 0), (5, None)]), Pace(2, 1, 2, late="drop"), 5) == Choice()


def test_old_groups_do_not_pile_up_behind_new_ones() -> None:
    # Three groups have this step or the next one as their last, and the next takes two: one of them has to go now.
    pace = Pace(2, 2, 4)
    assert choose(ledger_of([(4, 4), (4, 5), (4, 6), (5, 0), (5, 1), (5, 2)]), pace, 5).groups == (0, 3)


def test_a_step_without_enough_groups_takes_what_there_is() -> None:
    assert choose(ledger_of([(0, 1), (0, 0)]), Pace(4), 0).groups == (0, 1)
    assert choose(ledger_of([(0, 1), (0, None)]), Pace(4), 0).groups == ()


def test_room_is_for_a_step_and_for_what_is_ahead() -> None:
    ledger = ledger_of([(0, None), (0, 0)])
    assert room(ledger, Pace(4, 1, 4), collecting=True) == 6
    assert room(ledger, Pace(4, 1, 4), collecting=False) == 2
    assert room(ledger, Pace(1), collecting=True) == 0


@pytest.mark.parametrize(
    ("beside", "staleness", "oversample", "ahead"),
    [
        (True, 0, 1.0, 0),
        (True, 2, 1.0, 8),
        (False, 2, 1.0, 0),
        (False, 1, 1.25, 1),
        (False, 1, 1.3, 2),
        (False, 1, 3.0, 4),
    ],
)
def test_how_far_ahead_a_recipe_works(beside: bool, staleness: int, oversample: float, ahead: int) -> None:
    recipe = make_recipe(
        prompts=4, samples=1, steps=1, longest=8, rollout={"max_staleness": staleness, "oversample": oversample}
    )
    assert Pace.of(recipe, beside=beside) == Pace(4, staleness, ahead)


def test_the_collector_with_the_fewest_groups_gets_the_next() -> None:
    assert [owner_of(loads) for loads in ([2, 1, 1], [0, 0], [3])] == [1, 0, 0]
