"""Brings HF tensors together from the ranks that hold their parts, on any one rank: for exports, and for who sends weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from megarl.core.layout import Layout
from megarl.models.config import ModelConfig
from megarl.models.hf_weights import Bucket, Held, Unit, Value, layer_spec, planned, units_of
from megarl.models.mapping import take, window
from megarl.models.parts import Dealing, part_of
from megarl.models.rules import Rule, rules

# A HF tensor, and the rank that gives each of its parts.
Wanted = tuple[str, Sequence[int]]


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

    def gather(self, wanted: Mapping[int, Sequence[Wanted]], into: Mapping[str, Tensor] | None = None) -> Bucket:
        """Whole tensors on each rank that `wanted` names, none elsewhere; what is whole already may share memory with the model.

        wanted: the same on every rank. into: where this rank's tensors are to be, of their shapes and dtypes. Returns once they
        are there, elsewhere once this rank's parts are taken. Raises MegarlError where the model does not hold what a rule
        promises, or `value` gives something else.
        """
        found: Bucket = []
        operations: list[dist.P2POp] = []
        arriving: list[tuple[Tensor, Tensor]] = []  # into what, and where it belongs
        for to, tensors in wanted.items():
            for name, holders in tensors:
                unit = self._units[name]
                if to != self._rank:
                    operations += self._sends(unit, holders, to)
                    continue
                place = None if into is None or into[name].dtype != unit.dtype(self.dtype) else into[name]
                found.append((name, self._whole(unit, holders, place, operations, arriving)))
        self._exchange(operations)
        for received, place_of in arriving:
            place_of.copy_(received)
        if into is not None:
            for name, tensor in found:
                if tensor.data_ptr() != into[name].data_ptr():
                    into[name].copy_(tensor)
            return [(name, into[name]) for name, _ in found]
        return [(name, tensor.to(self._dtypes.get(name, tensor.dtype))) for name, tensor in found]

    def _whole(
        self,
        unit: Unit,
        holders: Sequence[int],
        place: Tensor | None,
        operations: list[dist.P2POp],
        arriving: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """The tensor, complete when the operations are done and what arrived is copied; in `place` unless it is whole here."""
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
            elif target.numel():
                received = target if target.is_contiguous() else torch.empty_like(target)
                operations.append(dist.P2POp(dist.irecv, received, group=self._group, group_peer=holder))
                if received is not target:
                    arriving.append((received, target))
        return whole

    def _sends(self, unit: Unit, holders: Sequence[int], to: int) -> Iterator[dist.P2POp]:
        """What this rank gives of the tensor: nothing, or one part."""
        if self._rank in holders:
            part = part_of(unit.rule, holders.index(self._rank), len(holders))
            tensor = take(self._held.value(unit.rule, part), part, unit.source)
            if tensor.numel():
                yield dist.P2POp(dist.isend, tensor.contiguous(), group=self._group, group_peer=to)

    def _exchange(self, operations: list[dist.P2POp]) -> None:
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()


def export_buckets(gatherer: Gatherer, bucket_bytes: int) -> Iterator[Bucket]:
    """The whole model under HF names, in the order of a forward pass, at most about `bucket_bytes` at a time.

    Collective: every rank has to take every bucket. Rank 0 gets whole tensors, which may share memory with the model; the
    others get empty buckets, equally many. A tensor larger than the limit is a bucket of its own. Padding and second copies of
    tied embeddings are left out. Rank 0 holds at most two buckets beside the model.
    """
    for bucket in planned(gatherer.units, gatherer.dtype, bucket_bytes):
        yield gatherer.gather({0: [(unit.name, gatherer.holders(unit.name)) for unit in bucket]})
