"""Which groups are replaced, by hand, and that a synchronous step's are the same whoever finishes first."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from megarl.recipe.algorithm import KeepGroups
from megarl.rollout.ledger import Entry
from megarl.rollout.refills import Refills
from tests.rollout.test_batcher import RIGHT, entry, group


def test_they_are_those_that_are_not_kept() -> None:
    finished = [
        entry(group(1, [0, 1, 0, 0], [1] * 4, parts=RIGHT)),
        entry(group(2, [1, 1, 1, 1], [1] * 4, parts=RIGHT)),
    ]
    for keep, chosen, why in (
        (None, [2], "zero_variance"),
        (KeepGroups(grader="right", above=0.5), [], "keep_groups"),
        (KeepGroups(grader="right", below=0.5), [1, 2], "keep_groups"),
        (KeepGroups(below=0.1), [1, 2], "keep_groups"),
    ):
        refills = Refills(2, keep)
        refills.begin(1)
        assert (refills.choose(finished), refills.why) == (chosen, why)


def finished(number: int, dull: bool) -> Entry:
    return entry(group(number, [1, 1] if dull else [0, 1], [1, 1]))


def test_a_step_that_is_made_again_has_what_was_replaced_for_it_and_may_replace_no_more() -> None:
    refills = Refills(2)
    refills.begin(1)
    assert refills.choose([finished(1, True)]) == [1]
    refills.given()
    assert refills.facts() == []
    refills.begin(1)
    assert [facts.group for facts in refills.facts()] == [1]
    assert refills.choose([finished(2, True), finished(3, True)]) == [2]
    refills.given()
    refills.begin(2)
    assert refills.facts() == [] and refills.choose([finished(4, True), finished(5, True)]) == [4, 5]


@given(dull=st.lists(st.booleans(), min_size=12, max_size=12), most=st.integers(0, 8), seed=st.integers(0, 2**32 - 1))
def test_a_synchronous_steps_are_the_first_by_their_numbers_whoever_finishes_first(
    dull: list[bool], most: int, seed: int
) -> None:
    """Four at a time, each replaced by the next number: as many as there may be, and never one that another would have been."""
    chance, refills = random.Random(seed), Refills(most)
    refills.begin(1)
    running, asked, open_ones = [0, 1, 2, 3], 4, list[int]()
    replaced, there = list[int](), list[int]()
    while running:
        number = running.pop(chance.randrange(len(running)))
        there.append(number)
        looked_at = [finished(each, dull[each]) for each in [*open_ones, number]]
        chosen = refills.choose(looked_at, running)
        open_ones = refills.undecided
        there = [each for each in there if each not in chosen]
        running += range(asked, asked + len(chosen))
        asked, replaced = asked + len(chosen), replaced + chosen
    expected = [number for number in range(asked) if dull[number]][:most]
    assert sorted(replaced) == expected and sorted([*there, *replaced]) == list(range(4 + len(expected)))
    assert not open_ones
