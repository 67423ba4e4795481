"""Brings HF tensors together from the ranks that hold their parts, on any one rank: for exports, and for who sends weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from megarl.core.layout import Layout
from megarl.models.config import ModelConfig
from megarl.models.hf_weights import Bucket, Held, Unit, Value, layer_spec, planned, units_of
from megarl.models.mapping import take, window
from megarl.models.parts import Dealing, Part, part_of
from megarl.models.rules import Rule, rules

# A HF tensor, and the rank that gives each of its parts.
Wanted = tuple[str, Sequence[int]]
# Columns do not arrive where they belong: most bytes of them that a rank holds beside the tensors.
STAGED_BYTES = 16 * 2**20


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
        return self._dealing.holders(self._units[name].rule)

    def dtype_of(self, name: str) -> torch.dtype:
        """Of an HF tensor as it is exported."""
        return self._dtypes.get(name, self._units[name].dtype(self.dtype))

    def gather(
        self,
        wanted: Mapping[int, Sequence[Wanted]],
        into: Mapping[str, Tensor] | None = None,
        staged_bytes: int = STAGED_BYTES,
    ) -> Bucket:
        """Whole tensors on each rank that `wanted` names, none elsewhere; what is whole already may share memory with the model.

        wanted, staged_bytes: the same on every rank. into: where this rank's tensors are to be, of their shapes and dtypes.
        staged_bytes: of columns that a rank receives at once, beside the memory of its tensors. Returns once they are there,
        elsewhere once this rank's parts are taken. Raises MegarlError where the model does not hold what a rule promises, or
        `value` gives something else.
        """
        found: Bucket = []
        rounds: list[_Round] = [_Round()]
        for to, tensors in wanted.items():
            turns = _Turns(staged_bytes)
            for name, holders in tensors:
                unit = self._units[name]
                if to != self._rank:
                    self._give(unit, holders, to, turns, rounds)
                    continue
                place = None if into is None or into[name].dtype != unit.dtype(self.dtype) else into[name]
                found.append((name, self._whole(unit, holders, place, turns, rounds)))
        while rounds:
            self._exchange(rounds.pop(0))
        if into is not None:
            for name, tensor in found:
                if tensor.data_ptr() != into[name].data_ptr():
                    into[name].copy_(tensor)
            return [(name, into[name]) for name, _ in found]
        return [(name, tensor.to(self._dtypes.get(name, tensor.dtype))) for name, tensor in found]

    def _whole(
        self, unit: Unit, holders: Sequence[int], place: Tensor | None, turns: _Turns, rounds: list[_Round]
    ) -> Tensor:
        """The tensor, complete once all rounds are done; in `place` unless it is whole here."""
        if tuple(holders) == (self._rank,):
            return take(self._held.value(unit.rule, part_of(unit.rule, 0, 1)), part_of(unit.rule, 0, 1), unit.source)
        whole = place
        if whole is None:
            whole = torch.empty(unit.shape, dtype=unit.dtype(self.dtype), device=self._device)
        for number, holder in enumerate(holders):
            part = part_of(unit.rule, number, len(holders))
            target = window(whole, part, unit.source)
            if holder == self._rank:
                target.copy_(take(self._held.value(unit.rule, part), part, unit.source))
                continue
            for turn, rows in turns.of(unit, part, len(holders), self.dtype):
                _round(rounds, turn).receives.append((holder, target[rows]))
        return whole

    def _give(self, unit: Unit, holders: Sequence[int], to: int, turns: _Turns, rounds: list[_Round]) -> None:
        """What this rank gives of the tensor: nothing, or one part."""
        for number, holder in enumerate(holders):
            if holder == to or not (holder == self._rank or is_staged(unit, len(holders))):
                continue
            part = part_of(unit.rule, number, len(holders))
            coming = list(turns.of(unit, part, len(holders), self.dtype))
            if holder == self._rank and coming:
                mine = take(self._held.value(unit.rule, part), part, unit.source)
                for turn, rows in coming:
                    _round(rounds, turn).sends.append((to, mine[rows]))

    def _exchange(self, together: _Round) -> None:
        arrived = [
            (
                target,
                target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format),
            )
            for _, target in together.receives
        ]
        operations = [
            *(
                dist.P2POp(dist.isend, tensor.contiguous(), group=self._group, group_peer=to)
                for to, tensor in together.sends
            ),
            *(
                dist.P2POp(dist.irecv, received, group=self._group, group_peer=holder)
                for (holder, _), (_, received) in zip(together.receives, arrived, strict=True)
            ),
        ]
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        for target, received in arrived:
            if received is not target:
                target.copy_(received)


@dataclass
class _Round:
    """What one rank sends and receives at once: (to whom, what) and (from whom, where it belongs)."""

    sends: list[tuple[int, Tensor]] = field(default_factory=list)
    receives: list[tuple[int, Tensor]] = field(default_factory=list)


def _round(rounds: list[_Round], number: int) -> _Round:
    while len(rounds) <= number:
        rounds.append(_Round())
    return rounds[number]


@dataclass
class _Turns:
    """In which round a rank receives what: all ranks count the same.

    Columns arrive in memory of their own, so that no more of them come in a round than `staged_bytes`, or a row.
    """

    staged_bytes: int
    _round: int = 0
    _staged: int = 0

    def of(self, unit: Unit, part: Part, count: int, dtype: torch.dtype) -> Iterator[tuple[int, slice]]:
        """The rounds of a part, one of `count`, each with its rows; none where it is empty."""
        where = part.rows(unit.source)
        num_rows = where.stop - where.start
        width = math.prod(part.shape[1:]) * unit.dtype(dtype).itemsize
        if not num_rows * width:
            return
        if not is_staged(unit, count):
            yield self._round, slice(0, num_rows)
            return
        start = 0
        while start < num_rows:
            if self._staged and self._staged + width > self.staged_bytes:
                self._round, self._staged = self._round + 1, 0
            stop = min(num_rows, start + max(1, (self.staged_bytes - self._staged) // width))
            self._staged += (stop - start) * width
            yield self._round, slice(start, stop)
            start = stop


def is_staged(unit: Unit, count: int) -> bool:
    """Whether parts, so many of the tensor, arrive in memory of their own: each is columns of it."""
    return count > 1 and unit.rule.cut == "columns"


def export_buckets(gatherer: Gatherer, bucket_bytes: int) -> Iterator[Bucket]:
    """The whole model under HF names, in the order of a forward pass, at most about `bucket_bytes` at a time.

    Collective: every rank has to take every bucket. Rank 0 gets whole tensors, which may share memory with the model; the
    others get empty buckets, equally many. A tensor larger than the limit is a bucket of its own. Padding and second copies of
    tied embeddings are left out. Rank 0 holds at most two buckets beside the model.
    """
    for bucket in planned(gatherer.units, gatherer.dtype, bucket_bytes):
        yield gatherer.gather({0: [(unit.name, gatherer.holders(unit.name)) for unit in bucket]})
