"""Brings HF tensors together from the ranks that hold their parts, on any one rank: for exports, and for who sends weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from megarl.core.errors import DeadlineError
from megarl.core.layout import Layout
from megarl.models.config import ModelConfig
from megarl.models.hf_weights import Bucket, Held, Share, Unit, Value, layer_spec, planned, units_of
from megarl.models.mapping import put, take, window
from megarl.models.parts import Dealing, part_of
from megarl.models.rules import Rule, rules

# A HF tensor, and the rank that gives each of its parts.
Wanted = tuple[str, Sequence[int]]
# Columns do not arrive where they belong: most bytes of them that a rank holds beside the tensors.
STAGED_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Places:
    """Where gathered tensors are to be, of those ranks that have said it.

    of: by rank and name, this rank's own, and those of ranks in whose memory it writes its parts itself; of the tensors' shapes.
    writers: by rank, who writes into its memory so; the same on every rank.
    """

    of: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    writers: Mapping[int, Collection[int]] = field(default_factory=dict)


NOWHERE = Places()


class Gatherer:
    """One rank's end. Every rank of the layout makes one and makes the same calls: gathering is collective.

    group: of all ranks; None where there is one. value: what to export in a parameter's place (gradients, merged weights), of
    its shape and of one dtype for all; it is given the global Megatron name. dtypes: of HF tensors that are to be in another
    dtype than the value. exported: rules of what to export; None is those of the model.
    """

    def __init__(
        self,
        chunks: Sequence[Module],
        config: ModelConfig,
        layout: Layout,
        rank: int,
        group: dist.ProcessGroup | None,
        value: Value | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
        exported: Iterable[Rule] | None = None,
    ) -> None:
        self.config, self.layout, self.spec = config, layout, layer_spec(chunks)
        self._held, self._rank, self._group = Held(chunks, layout, rank, value), rank, group
        self.dtype, self._device = self._held.dtype, self._held.device
        self._dtypes = dtypes or {}
        self.units = tuple(units_of(rules(config, self.spec) if exported is None else exported))
        self._units = {unit.name: unit for unit in self.units}
        self._dealing = Dealing(config, layout)

    def holders(self, name: str) -> list[int]:
        """The rank of each part of an HF tensor in the first copy of the model."""
        return self._units[name].holders(self._dealing)

    def dtype_of(self, name: str) -> torch.dtype:
        """Of an HF tensor as it is exported."""
        return self._dtypes.get(name, self._units[name].dtype(self.dtype))

    def gather(
        self, wanted: Mapping[int, Sequence[Wanted]], places: Places = NOWHERE, staged_bytes: int = STAGED_BYTES
    ) -> Bucket:
        """Whole tensors on each rank that `wanted` names, none elsewhere; what is whole already may share memory with the model.

        wanted, staged_bytes: the same on every rank. places: memory that nobody uses any more, where tensors are to be.
        staged_bytes: of columns that a rank receives at once, beside the memory of its tensors. Returns once they are there,
        elsewhere once this rank's parts are taken. Raises MegarlError where the model does not hold what a rule promises, or
        `value` gives something else; DeadlineError, with the ranks, where another does not come.
        """
        found: Bucket = []
        steps = _Steps()
        for to, tensors in wanted.items():
            turns, writers = _Turns(staged_bytes), frozenset(places.writers.get(to, ())) - {to}
            place = places.of.get(to, {})
            for name, holders in tensors:
                unit = self._units[name]
                if to == self._rank:
                    found.append((name, self._whole(unit, holders, place.get(name), writers, turns, steps)))
                else:
                    self._give(unit, holders, to, place.get(name), writers, turns, steps)
            writing = writers.intersection(holder for _, holders in tensors for holder in holders)
            steps.meet(to, sorted(writing), self._rank, self._device)
        ready = self._begin(steps.ready)
        if steps.ready.receives:
            self._finish(ready, "for room in memory that it writes into")
        for put_one in steps.puts:
            share = put_one.share
            put(share.of(put_one.whole), self._held.value(share.rule, share.part), share.part, share.source)
        while steps.rounds:
            self._finish(self._begin(steps.rounds.pop(0)), "for parts of tensors")
        self._finish(self._begin(steps.written), "for parts that others write into its memory")
        if not steps.ready.receives:
            self._finish(ready, "for those who write into its memory")
        return found

    def _whole(
        self,
        unit: Unit,
        holders: Sequence[int],
        place: Tensor | None,
        writers: Collection[int],
        turns: _Turns,
        steps: _Steps,
    ) -> Tensor:
        """The tensor, complete once all steps are done; in `place` where there is one, unless it is whole here."""
        dtype = self.dtype_of(unit.name)
        if tuple(holders) == (self._rank,) and place is None and not unit.is_stacked:
            part = part_of(unit.rule, 0, 1)
            return take(self._held.value(unit.rule, part), part, unit.source).to(dtype).reshape(unit.shape)
        whole = torch.empty(unit.shape, dtype=dtype, device=self._device) if place is None else place
        for share, holder in zip(unit.shares(len(holders)), holders, strict=True):
            if holder == self._rank:
                steps.puts.append(_Put(whole, share))
            elif holder not in writers:
                for turn, rows, _ in turns.of(share, unit.dtype(self.dtype)):
                    target = window(share.of(whole), share.part, rows)
                    steps.round(turn).receives.append((holder, target, unit.dtype(self.dtype)))
        return whole

    def _give(
        self,
        unit: Unit,
        holders: Sequence[int],
        to: int,
        place: Tensor | None,
        writers: Collection[int],
        turns: _Turns,
        steps: _Steps,
    ) -> None:
        """What this rank gives of the tensor: nothing, one part, or the slots of its experts."""
        for share, holder in zip(unit.shares(len(holders)), holders, strict=True):
            if holder == to or not (holder == self._rank or is_staged(share)):
                continue
            if holder in writers:
                if holder == self._rank:
                    assert place is not None, (unit.name, to)
                    steps.puts.append(_Put(place, share))
                continue
            coming = list(turns.of(share, unit.dtype(self.dtype)))
            if holder == self._rank and coming:
                mine = take(self._held.value(share.rule, share.part), share.part, share.source)
                for turn, _, rows in coming:
                    steps.round(turn).sends.append((to, mine[rows]))

    def _begin(self, together: _Round) -> _Begun:
        arrived = [
            (
                target,
                target
                if target.is_contiguous() and target.dtype == dtype
                else torch.empty(target.shape, dtype=dtype, device=target.device),
            )
            for _, target, dtype in together.receives
        ]
        operations = [
            *(
                dist.P2POp(dist.isend, tensor.contiguous(), group=self._group, group_peer=to)
                for to, tensor in together.sends
            ),
            *(
                dist.P2POp(dist.irecv, received, group=self._group, group_peer=holder)
                for (holder, *_), (_, received) in zip(together.receives, arrived, strict=True)
            ),
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Begun(works, operations, arrived, together.peers)

    def _finish(self, begun: _Begun, waits: str) -> None:
        """waits: for what, as an error says it."""
        try:
            for work in begun.works:
                work.wait()
        except RuntimeError as error:  # what a backend raises has no class of its own
            others = ", ".join(map(str, begun.peers))
            raise DeadlineError(
                f"Weights were not gathered: rank {self._rank} waited {waits}, with rank {others}: {error}"
            ) from error
        for target, received in begun.arrived:
            if received is not target:
                target.copy_(received)


@dataclass
class _Round:
    """What one rank sends and receives at once: (to whom, what) and (from whom, where it belongs, as what it comes)."""

    sends: list[tuple[int, Tensor]] = field(default_factory=list)
    receives: list[tuple[int, Tensor, torch.dtype]] = field(default_factory=list)

    @property
    def peers(self) -> list[int]:
        """The ranks that this one needs for it."""
        return sorted({to for to, _ in self.sends} | {holder for holder, *_ in self.receives})


@dataclass(frozen=True)
class _Begun:
    """A round under way; it keeps its memory alive. arrived: where things belong, and where they come."""

    works: Sequence[Any]
    operations: Sequence[Any]
    arrived: Sequence[tuple[Tensor, Tensor]]
    peers: Sequence[int]


@dataclass(frozen=True)
class _Put:
    """A part that this rank writes into a whole tensor."""

    whole: Tensor
    share: Share


@dataclass
class _Steps:
    """What one rank does, in this order; the ranks that it meets do the same steps.

    ready: words that memory may be written to. puts: parts that this rank writes, into its own memory or another's. rounds: parts
    that are sent. written: words that all is where it belongs.
    """

    ready: _Round = field(default_factory=_Round)
    puts: list[_Put] = field(default_factory=list)
    rounds: list[_Round] = field(default_factory=list)
    written: _Round = field(default_factory=_Round)

    def round(self, number: int) -> _Round:
        """The round of that number."""
        while len(self.rounds) <= number:
            self.rounds.append(_Round())
        return self.rounds[number]

    def meet(self, to: int, writers: Sequence[int], rank: int, device: torch.device) -> None:
        """Have `to` and those who write into its memory tell each other when."""
        for writer in writers if rank == to else [each for each in writers if each == rank]:
            ready, written = torch.zeros(2, 1, dtype=torch.uint8, device=device)
            if rank == to:
                self.ready.sends.append((writer, ready))
                self.written.receives.append((writer, written, written.dtype))
            else:
                self.ready.receives.append((to, ready, ready.dtype))
                self.written.sends.append((to, written))


@dataclass
class _Turns:
    """In which round a rank receives what: all ranks count the same.

    Columns arrive in memory of their own, so that no more of them come in a round than `staged_bytes`, or a row.
    """

    staged_bytes: int
    _round: int = 0
    _staged: int = 0

    def of(self, share: Share, dtype: torch.dtype) -> Iterator[tuple[int, slice, slice]]:
        """The rounds of a share, each with its rows of the source and of `take`'s; none where it is empty. dtype: it comes in."""
        width = math.prod(share.part.shape[1:]) * dtype.itemsize
        taken = 0
        for where in share.part.ranges(share.source) if width else []:
            start = where.start
            while start < where.stop:
                stop = self._stop(start, where.stop, width) if is_staged(share) else where.stop
                yield self._round, slice(start, stop), slice(taken, taken + stop - start)
                start, taken = stop, taken + stop - start

    def _stop(self, start: int, stop: int, width: int) -> int:
        """Behind the last of these rows that come in the round, which is another where this one is full."""
        if self._staged and self._staged + width > self.staged_bytes:
            self._round, self._staged = self._round + 1, 0
        stop = min(stop, start + max(1, (self.staged_bytes - self._staged) // width))
        self._staged += (stop - start) * width
        return stop


def is_staged(share: Share) -> bool:
    """Whether it arrives in memory of its own: where it belongs are columns of the tensor, or a slot in it."""
    return (share.count > 1 and share.rule.cut == "columns") or share.rule.sources[share.source].slot is not None


def export_buckets(gatherer: Gatherer, bucket_bytes: int) -> Iterator[Bucket]:
    """The whole model under HF names, in the order of a forward pass, at most about `bucket_bytes` at a time.

    Collective: every rank has to take every bucket. Rank 0 gets whole tensors, which may share memory with the model; the
    others get empty buckets, equally many. A tensor larger than the limit is a bucket of its own. Padding and second copies of
    tied embeddings are left out. Rank 0 holds at most two buckets beside the model.
    """
    for bucket in planned(gatherer.units, gatherer.dtype, bucket_bytes):
        yield gatherer.gather({0: [(unit.name, gatherer.holders(unit.name)) for unit in bucket]})
