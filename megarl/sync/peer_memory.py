"""Memory of ranks that other ranks of their node write into: what a rank puts together lies there, and no socket carries it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, Self

import torch.distributed as dist
from torch import Tensor

from megarl.core.errors import MegarlError
from megarl.core.log import get_logger
from megarl.models.all_gather import all_gather_objects

log = get_logger(__name__)

Reasons = dict[int, str]  # by the rank whose memory it is about


class PeerSegment(Protocol):
    """Memory of one rank, as this or another one has it. flat: [bytes] uint8."""

    flat: Tensor

    def share(self) -> Any:
        """What one other process opens it with; picklable."""
        ...

    def hide(self) -> None:
        """Take away its name, where it has one, once all who open it have: nothing is left of it whoever is killed."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class PeerMemory:
    """One rank's end. Every rank makes one, and calls `take` with the same arguments; it is kept from one sync to the next.

    make: takes so many bytes of this rank's device. open_: another rank's, of what its `share` gave. control: the trainer ranks'
    own process group; None where there is one rank. is_kept: whether `rest` leaves the memory: where pages are new each time, to
    take it anew costs as much as to write into it.
    """

    def __init__(
        self,
        *,
        rank: int,
        make: Callable[[int], PeerSegment],
        open_: Callable[[Any], PeerSegment],
        control: dist.ProcessGroup | None,
        is_kept: bool,
    ) -> None:
        self._rank, self._make, self._open, self._control, self._is_kept = rank, make, open_, control, is_kept
        self._held: dict[int, PeerSegment] = {}
        self._writers: dict[int, frozenset[int]] = {}
        self._taken: tuple[Mapping[int, int], Mapping[int, frozenset[int]]] = {}, {}
        self._is_closed_to_others = False

    def take(self, sizes: Mapping[int, int], writers: Mapping[int, frozenset[int]]) -> None:
        """Have memory of these bytes on these ranks, into which those ranks write; collective unless it is as it was.

        Where it is not to be had, or cannot be opened, those ranks send what they hold: rank 0 says in the log why. What could
        not be opened once is not tried again: a device's memory stays taken while somebody was given a handle to open it with.
        """
        if self._taken == (sizes, writers):
            return
        self.close()
        if self._is_closed_to_others:
            return
        reasons: Reasons = {}
        given: dict[int, Any] = {}
        if self._rank in sizes:
            try:
                self._held[self._rank] = mine = self._make(sizes[self._rank])
                given = {writer: mine.share() for writer in writers[self._rank]}
            except (MegarlError, RuntimeError) as error:  # torch's own, out of memory, is a RuntimeError
                reasons[self._rank] = str(error)
        handles = self._all(given)
        for to, told in enumerate(handles):
            if self._rank in told:
                try:
                    self._held[to] = self._open(told[self._rank])
                except (MegarlError, RuntimeError, OSError) as error:
                    reasons[to] = str(error)
        found = self._all((frozenset(self._held), reasons))
        if self._rank in self._held:
            self._held[self._rank].hide()
        self._writers = {to: frozenset(each for each in who if to in found[each][0]) for to, who in writers.items()}
        self._taken = sizes, writers
        self._is_closed_to_others = any(to != rank for rank, (_, reasons) in enumerate(found) for to in reasons)
        if self._rank == 0:
            _say([each for _, each in found])

    def of(self, rank: int) -> Tensor | None:
        """A rank's memory, [bytes] uint8; None where it has none, or this rank does not write into it."""
        return self._held[rank].flat if rank in self._held else None

    def writers(self, to: int) -> Collection[int]:
        """Who writes into a rank's memory; the same on every rank."""
        return self._writers.get(to, frozenset())

    def rest(self) -> None:
        """Until the next sync."""
        if not self._is_kept:
            self.close()

    def close(self) -> None:
        """Give it back. Another rank's first: who made it takes it back once nobody has it any more."""
        for rank in sorted(self._held, key=self._rank.__eq__):
            self._held[rank].close()
        self._held, self._writers, self._taken = {}, {}, ({}, {})

    def _all(self, mine: Any) -> list[Any]:
        assert self._control is not None, "one rank has nobody who writes into its memory"
        return all_gather_objects(mine, self._control)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.rest()


def _say(troubles: Sequence[Reasons]) -> None:
    for rank, reasons in enumerate(troubles):
        for to, reason in reasons.items():
            whose = "its own memory" if to == rank else f"the memory of rank {to}"
            log.warning(
                "rank %d cannot share %s: parts of tensors are sent in its place. %s", rank, whose, reason.strip()
            )
