"""The book of groups: what each event does, and that what does not follow is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megarl.core.types import VersionSpan
from megarl.rollout.facts import GroupFacts
from megarl.rollout.ledger import (
    Admitted,
    Committed,
    Dropped,
    Event,
    Finished,
    Ledger,
    LedgerError,
    Lost,
    Returned,
    Taken,
    keys_of,
)


def facts(group: int, *versions: int, failed: bool = False) -> GroupFacts:
    """A group of one sample, a token of each of these versions."""
    flags = np.array([failed])
    return GroupFacts(
        group=group,
        prompt_tokens=np.array([3]),
        response_tokens=np.array([len(versions)]),
        trained_tokens=np.array([len(versions)]),
        rewards=np.array([1.0], np.float32),
        mean_nll=np.array([1.0], np.float32),
        usable=~flags,
        truncated=~flags & failed,
        failed=flags,
        ungraded=~flags & failed,
        spans=(tuple(VersionSpan(version, at, at + 1) for at, version in enumerate(versions)),),
    )


def admitted(group: int, version: int = 0, owner: int = 0) -> Admitted:
    return Admitted(group, row=10 + group, step=1, first=0, version=version, owner=owner)


def ledger_after(*events: Event) -> Ledger:
    ledger = Ledger()
    for event in events:
        ledger.apply(event)
        ledger.check_balance()
    return ledger


RUNNING = (admitted(0),)
FINISHED = (*RUNNING, Finished(facts(0, 0)))
TAKEN = (*FINISHED, Taken(1, (0,)))
COMMITTED = (*TAKEN, Committed(1))
DROPPED = (*RUNNING, Dropped(0, "late"))


def test_a_group_goes_from_running_to_committed() -> None:
    assert [ledger_after(*RUNNING).num(phase) for phase in ("running", "finished", "taken")] == [1, 0, 0]
    assert [ledger_after(*FINISHED).num(phase) for phase in ("running", "finished", "taken")] == [0, 1, 0]
    assert [ledger_after(*TAKEN).num(phase) for phase in ("running", "finished", "taken")] == [0, 0, 1]
    done = ledger_after(*COMMITTED)
    assert (done.admitted, done.committed, done.under_way()) == (1, 1, [])


@pytest.mark.parametrize(
    ("before", "event"),
    [
        ((), Finished(facts(0, 0))),
        ((), Dropped(0, "late")),
        ((), Lost(0, 1, 1)),
        ((), Taken(1, (0,))),
        ((), admitted(1)),
        (RUNNING, admitted(0)),
        (RUNNING, Taken(1, (0,))),
        (FINISHED, Finished(facts(0, 0))),
        (FINISHED, Taken(1, (0, 0))),
        (TAKEN, Taken(2, (0,))),
        (TAKEN, Finished(facts(0, 0))),
        (COMMITTED, Taken(2, (0,))),
        (COMMITTED, Finished(facts(0, 0))),
        (COMMITTED, Dropped(0, "late")),
        (COMMITTED, Lost(0, 1, 1)),
        (DROPPED, Finished(facts(0, 0))),
        (DROPPED, Dropped(0, "late")),
        (DROPPED, Lost(0, 1, 1)),
        (DROPPED, admitted(0)),
    ],
)
def test_what_does_not_follow_is_refused(before: tuple[Event, ...], event: Event) -> None:
    ledger = ledger_after(*before)
    with pytest.raises(LedgerError):
        ledger.apply(event)


@pytest.mark.parametrize("before", [RUNNING, FINISHED, TAKEN])
def test_groups_are_dropped_or_lost_from_every_phase(before: tuple[Event, ...]) -> None:
    dropped = ledger_after(*before, Dropped(0, "late"))
    assert dropped.dropped == {"late": 1} and not dropped.under_way()
    lost = ledger_after(*before, Lost(0, owner=2, version=5))
    [entry] = lost.running()
    assert entry.asked == replace(admitted(0), owner=2, version=5)
    assert (entry.facts, entry.oldest, lost.lost, lost.load(0), lost.load(2)) == (None, 5, 1, 0, 1)


def test_a_step_that_is_made_again_has_its_groups_back_in_the_order_of_finishing() -> None:
    groups = [*map(admitted, range(4)), *(Finished(facts(group, 0)) for group in (2, 0, 3, 1))]
    ledger = ledger_after(*groups, Taken(1, (0, 2)))
    assert [entry.asked.group for entry in ledger.finished()] == [3, 1]
    ledger.apply(Returned(1))
    assert [entry.asked.group for entry in ledger.finished()] == [2, 0, 3, 1]
    ledger.apply(Returned(1))  # nothing is taken any more
    assert ledger.waiting() == 4


def test_a_commit_is_of_one_step() -> None:
    groups = [*map(admitted, range(3)), *(Finished(facts(group, 0)) for group in range(3))]
    ledger = ledger_after(*groups, Taken(1, (0,)), Taken(2, (2, 1)))
    ledger.apply(Committed(1))
    assert ledger.committed == 1
    assert [entry.asked.group for entry in ledger.taken(2)] == [1, 2]


def test_ages_and_loads_are_those_of_the_groups() -> None:
    ledger = ledger_after(
        admitted(0, 3),
        admitted(1, 3, owner=1),
        admitted(2, 4),
        Finished(facts(0, 4, 5)),
        Finished(facts(1, failed=True)),
    )
    assert (dict(ledger.ages("running")), dict(ledger.ages("finished"))) == ({4: 1}, {4: 1, 3: 1})
    assert (ledger.load(0), ledger.load(1), ledger.load(2)) == (1, 0, 0)
    ledger.apply(Taken(1, (0, 1)))
    assert not ledger.ages("finished")


def test_groups_are_asked_for_again_by_row_step_and_first_sample() -> None:
    ledger = ledger_after(admitted(0), Admitted(1, 7, 4, 2, 0, 0))
    assert keys_of(ledger.under_way()) == [(10, 1, 0), (7, 4, 2)]


def test_a_book_that_does_not_add_up_is_found() -> None:
    ledger = ledger_after(*RUNNING)
    ledger.admitted += 1
    with pytest.raises(LedgerError, match="2 groups were admitted, and 1 are accounted for: 1 under way"):
        ledger.check_balance()
