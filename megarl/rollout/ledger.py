"""The book of a run's groups: admitted, finished, taken by a step, committed, dropped and why, exactly once each.

State is a fold over events, so that writing the events down is enough to know the state again. It knows numbers, lengths,
versions and rewards, never tokens. A group's samples stay together: all of them take each step of its life at once.

    running -> finished -> taken -> committed          running, finished, taken -> dropped
    running, finished, taken -> running (lost: whoever held it died, and it is asked for anew)
    taken -> finished (returned: its step has to be made again)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from megarl.core.errors import MegarlError
from megarl.rollout.facts import GroupFacts

Phase = Literal["running", "finished", "taken"]
# What a group is called in all lives of a run: row of the data, step that it is meant for, number of its first sample.
Key = tuple[int, int, int]


class LedgerError(MegarlError):
    """An event that does not follow from those before it: a group lost, doubled or unknown. A fault of megarl."""


@dataclass(frozen=True)
class Admitted:
    """A group is asked for.

    group: its number. row: of the data. step: that it is meant for. first: number of its first sample among those of this
    row in this step. version: of the weights at this time: no token of it is older. owner: the collector that makes it.
    """

    group: int
    row: int
    step: int
    first: int
    version: int
    owner: int


@dataclass(frozen=True)
class Finished:
    """All samples of a group are generated and graded, or have failed."""

    facts: GroupFacts


@dataclass(frozen=True)
class Taken:
    """A step trains on these groups."""

    step: int
    groups: tuple[int, ...]


@dataclass(frozen=True)
class Committed:
    """A step has been trained on: its groups are done with."""

    step: int


@dataclass(frozen=True)
class Dropped:
    """A group is not trained on. why: a word for the counts."""

    group: int
    why: str


@dataclass(frozen=True)
class Lost:
    """Whoever held the group died; another owner makes it anew, with weights of this version."""

    group: int
    owner: int
    version: int


@dataclass(frozen=True)
class Returned:
    """The step that took these has to be made again: they wait for it as they did before."""

    step: int


Event = Admitted | Finished | Taken | Committed | Dropped | Lost | Returned


@dataclass
class Entry:
    """What is known of a group that is not done with.

    order: of its finishing, among all; -1 while it runs. oldest: the oldest version that a token of it may have.
    """

    asked: Admitted
    phase: Phase = "running"
    facts: GroupFacts | None = None
    order: int = -1
    step: int = -1  # that took it
    oldest: int = field(init=False)

    def __post_init__(self) -> None:
        known = self.facts.oldest if self.facts is not None else None
        self.oldest = self.asked.version if known is None else known


class Ledger:
    """The fold, over numbered groups."""

    def __init__(self) -> None:
        self.admitted = 0
        self.committed = 0
        self.dropped: Counter[str] = Counter()
        self.lost = 0
        self._order = 0
        self._in: dict[Phase, dict[int, Entry]] = {"running": {}, "finished": {}, "taken": {}}
        # Counts that are asked for at each event, when thousands of groups are under way.
        self._loads: Counter[int] = Counter()
        self._ages: dict[Phase, Counter[int]] = {"running": Counter(), "finished": Counter(), "taken": Counter()}

    def apply(self, event: Event) -> None:
        """Take an event in. Raises LedgerError where it does not follow."""
        match event:
            case Admitted():
                if event.group != self.admitted:
                    raise LedgerError(f"{event}: the next group's number is {self.admitted}.")
                self._enter(Entry(event), "running")
                self.admitted += 1
            case Finished():
                entry = self._left(event.facts.group, "running", event)
                self._enter(Entry(entry.asked, "finished", event.facts, self._order), "finished")
                self._order += 1
            case Taken():
                for group in event.groups:
                    entry = self._left(group, "finished", event)
                    entry.step = event.step
                    self._enter(entry, "taken")
            case Committed():
                done = self.taken(event.step)
                for entry in done:
                    self._left(entry.asked.group, "taken", event)
                self.committed += len(done)
            case Dropped():
                self._left(event.group, self._found(event.group, event).phase, event)
                self.dropped[event.why] += 1
            case Lost():
                entry = self._left(event.group, self._found(event.group, event).phase, event)
                self._enter(Entry(replace(entry.asked, owner=event.owner, version=event.version)), "running")
                self.lost += 1
            case Returned():
                for entry in self.taken(event.step):
                    self._enter(self._left(entry.asked.group, "taken", event), "finished")

    def get(self, group: int) -> Entry | None:
        """A group that is not done with."""
        return next((entries[group] for entries in self._in.values() if group in entries), None)

    def running(self) -> list[Entry]:
        """Groups that are being made, oldest admission first."""
        return sorted(self._in["running"].values(), key=lambda entry: entry.asked.group)

    def finished(self) -> list[Entry]:
        """Groups that wait for a step, in the order in which they finished."""
        return sorted(self._in["finished"].values(), key=lambda entry: entry.order)

    def taken(self, step: int) -> list[Entry]:
        """Groups that this step trains on, oldest admission first."""
        found = [entry for entry in self._in["taken"].values() if entry.step == step]
        return sorted(found, key=lambda entry: entry.asked.group)

    def under_way(self) -> list[Entry]:
        """All groups that are not done with, oldest admission first."""
        found = [entry for entries in self._in.values() for entry in entries.values()]
        return sorted(found, key=lambda entry: entry.asked.group)

    def keys(self, groups: Iterable[int]) -> list[Key]:
        """What these are called in all lives of a run, without those that are done with."""
        return keys_of(entry for entry in map(self.get, groups) if entry is not None)

    def num(self, phase: Phase) -> int:
        """How many groups are in a phase."""
        return len(self._in[phase])

    def load(self, owner: int) -> int:
        """How many groups this collector is making."""
        return self._loads[owner]

    def ages(self, phase: Phase) -> Mapping[int, int]:
        """How many groups of a phase there are by the oldest version that a token of them may have."""
        return self._ages[phase]

    def waiting(self) -> int:
        """Groups that no step has taken: running or finished."""
        return self.num("running") + self.num("finished")

    def check_balance(self) -> None:
        """Raises LedgerError where groups do not add up: each admitted one is somewhere, once."""
        under_way = sum(map(len, self._in.values()))
        accounted = under_way + self.committed + self.dropped.total()
        if accounted != self.admitted:
            raise LedgerError(
                f"{self.admitted} groups were admitted, and {accounted} are accounted for: {under_way} under way, "
                f"{self.committed} trained on, {self.dropped.total()} dropped."
            )

    def _found(self, group: int, event: Event) -> Entry:
        entry = self.get(group)
        if entry is None:
            raise LedgerError(f"{event}: group {group} is not under way: never admitted, or trained on, or dropped.")
        return entry

    def _left(self, group: int, phase: Phase, event: Event) -> Entry:
        """The group, taken out of its phase."""
        entry = self._found(group, event)
        if entry.phase != phase:
            raise LedgerError(f"{event}: group {group} is {entry.phase}, not {phase}.")
        del self._in[phase][group]
        self._ages[phase][entry.oldest] -= 1
        if not self._ages[phase][entry.oldest]:
            del self._ages[phase][entry.oldest]
        self._loads[entry.asked.owner] -= phase == "running"
        return entry

    def _enter(self, entry: Entry, phase: Phase) -> None:
        entry.phase = phase
        self._in[phase][entry.asked.group] = entry
        self._ages[phase][entry.oldest] += 1
        self._loads[entry.asked.owner] += phase == "running"


def keys_from(written: Iterable[Sequence[int]]) -> Iterator[Key]:
    """As a file has them."""
    return ((int(row), int(step), int(first)) for row, step, first in written)


def keys_of(entries: Iterable[Entry]) -> list[Key]:
    """What it takes to ask for groups again."""
    return [(entry.asked.row, entry.asked.step, entry.asked.first) for entry in entries]
