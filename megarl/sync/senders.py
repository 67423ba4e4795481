"""Which rank sends which tensors, and in which order the senders take turns. Pure; plan.py makes the table of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megarl.core.layout import Layout, place
from megarl.models.config import ModelConfig
from megarl.models.parts import Dealing, num_parts, part_of
from megarl.models.rule_table import FUSED, Cut
from megarl.models.rules import LayerSpec, Rule, Source, rules

# Each sender is a process group that every server joins, with communicators' memory on every device.
MOST_SENDERS = 32
BUFFER_BYTES = 4


@dataclass(frozen=True)
class Tensor:
    """One HF tensor. stage: the pipeline stage that holds it. ep: of an expert's, the expert-parallel rank.

    parts: bytes of each part, over tensor parallel (an expert's: expert-tensor parallel); one where it is not cut; of a tensor
    of so many `experts`, those of each, one expert's behind the other's.
    """

    name: str
    shape: tuple[int, ...]
    is_buffer: bool
    nbytes: int
    stage: int
    ep: int | None
    parts: tuple[int, ...]
    experts: int = 0

    @property
    def held(self) -> tuple[int, int | None, int, int]:
        """What its holders follow from: stage, expert-parallel rank, number of parts, and of experts."""
        return self.stage, self.ep, len(self.parts), self.experts


# What cannot be in two buckets: nearly always one tensor.
Unit = tuple[Tensor, ...]


def units_of(config: ModelConfig, layout: Layout, spec: LayerSpec, bytes_each: int) -> list[Unit]:
    """Every HF tensor once, in the order of a forward pass."""
    dealing = Dealing(config, layout)
    found: dict[tuple[object, ...], Unit] = {}
    for rule in rules(config, spec):
        # Where the first copy's first part is, is the stage; and for experts the expert-parallel rank.
        where = place(dealing.holders(rule)[0], layout)
        ep = None if rule.expert is None else where.ep
        each = BUFFER_BYTES if rule.is_buffer else bytes_each
        together = rule.megatron.endswith(FUSED)
        nameless = tuple(replace(source, name="", slot=None) for source in rule.sources)
        cut = _part_sizes(nameless, rule.cut, rule.rounds, rule.is_padded, num_parts(rule, layout))
        for index, (source, sizes) in enumerate(zip(rule.sources, cut, strict=True)):
            parts = tuple(size * each for size in sizes)
            nbytes = math.prod(source.stored) * each
            tensor = Tensor(source.name, source.stored, rule.is_buffer, nbytes, where.pp, ep, parts)
            if source.slot is not None:
                [stacked] = found.get((source.name,), (replace(tensor, ep=None, parts=()),))
                more = (*stacked.parts, *parts)
                found[source.name,] = (replace(stacked, parts=more, experts=source.slot.expert + 1),)
                continue
            key = ("fused", rule.layer) if together else (rule.megatron, index)
            found[key] = (*found.get(key, ()), tensor)
    return list(found.values())


@lru_cache(maxsize=1024)
def _part_sizes(
    sources: tuple[Source, ...], cut: Cut, rounds: int, is_padded: bool, count: int
) -> tuple[tuple[int, ...], ...]:
    """[source][part] elements: alike for all layers, and for all experts."""
    rule = Rule("", sources, cut, rounds, is_padded, layer=0)
    parts = [part_of(rule, index, count) for index in range(count)]
    found = []
    for index, source in enumerate(sources):
        sizes = []
        for part in parts:
            rows = sum(run.stop - run.start for run in part.of(index))
            width = math.prod(source.shape[1:]) if part.columns is None else part.columns.stop - part.columns.start
            sizes.append(rows * width)
        found.append(tuple(sizes))
    return tuple(found)


def nbytes_of(unit: Unit) -> int:
    """Bytes of the tensors that go together."""
    return sum(tensor.nbytes for tensor in unit)


def streams(
    units: Sequence[Unit], layout: Layout, nodes: Sequence[int], most_senders: int = MOST_SENDERS
) -> dict[int, list[Unit]]:
    """Sender -> what it sends, the largest first.

    Senders of a stage are the ranks of its first copies: of experts one, of the rest as many as there are beside these
    ranks. More data-parallel copies would not send faster: a server takes one bucket at a time, and the links of a
    sender's whole node carry it. Each unit goes to the sender with the fewest bytes so far, largest units first, so that
    senders of a stage differ by at most the largest unit.
    """
    has_experts = any(unit[0].ep is not None or unit[0].experts for unit in units)
    used = math.lcm(layout.tp, layout.ep * layout.etp) if has_experts else layout.tp
    ranks = [stage * layout.stage_size + inner for stage in range(layout.pp) for inner in range(used)]
    leads = _leads(ranks, layout, nodes, most_senders)
    by_stage: dict[tuple[int, int | None], list[int]] = {}
    for rank, lead in leads.items():
        where = place(rank, layout)
        for key in ((where.pp, None), (where.pp, where.ep)):
            found = by_stage.setdefault(key, [])
            found += [lead] if lead not in found else []
    loads = dict.fromkeys(sorted(set(leads.values())), 0)
    sent: dict[int, list[Unit]] = {lead: [] for lead in loads}
    # Experts first: they have fewer ranks to choose from, and the rest evens out what they leave uneven.
    for unit in sorted(units, key=lambda unit: (unit[0].ep is None, -nbytes_of(unit))):
        sender = min(by_stage[unit[0].stage, unit[0].ep], key=lambda rank: (loads[rank], rank))
        loads[sender] += nbytes_of(unit)
        sent[sender].append(unit)
    # With the largest first the last buckets are small, and nothing hides how long servers load the last one.
    return {sender: sorted(mine, key=lambda unit: -nbytes_of(unit)) for sender, mine in sent.items() if mine}


def _leads(ranks: Sequence[int], layout: Layout, nodes: Sequence[int], most: int) -> dict[int, int]:
    """Rank -> the rank that sends for it: itself, or the first of its share of the stage's ranks on that node."""
    if len(ranks) <= most:
        return {rank: rank for rank in ranks}
    each = max(1, most // len({(nodes[rank], place(rank, layout).pp) for rank in ranks}))
    groups: dict[tuple[int, int], list[int]] = {}
    for rank in ranks:
        groups.setdefault((nodes[rank], place(rank, layout).pp), []).append(rank)
    leads = {}
    for group in groups.values():
        # A divisor, so that all send for as many ranks.
        count = max(size for size in range(1, min(each, len(group)) + 1) if len(group) % size == 0)
        share = len(group) // count
        leads.update({rank: group[index // share * share] for index, rank in enumerate(group)})
    return leads


def packed(units: Iterable[Unit], bucket_bytes: int) -> Iterator[tuple[Tensor, ...]]:
    """Buckets of at most so many bytes; a unit that is larger is one of its own."""
    bucket: list[Tensor] = []
    size = 0
    for unit in units:
        nbytes = nbytes_of(unit)
        if bucket and size + nbytes > bucket_bytes:
            yield tuple(bucket)
            bucket, size = [], 0
        bucket += unit
        size += nbytes
    if bucket:
        yield tuple(bucket)


def interleaved(sent: Mapping[int, list[Unit]], bucket_bytes: int) -> list[tuple[int, tuple[Tensor, ...]]]:
    """All senders' buckets in one order, with their senders: each sender's spread evenly over the whole.

    A server takes one bucket at a time, so that two that met senders in different orders would wait for each other for
    ever. Between two buckets of one sender those of all others go out: meanwhile it gathers its next, and all end together.
    Of senders with as many buckets the one whose first is smallest begins, for nothing is sent while that is gathered.
    """
    turns = []
    for sender, units in sent.items():
        buckets = list(packed(units, bucket_bytes))
        first = sum(tensor.nbytes for tensor in buckets[0])
        turns += [((index + 0.5) / len(buckets), first, sender, bucket) for index, bucket in enumerate(buckets)]
    return [(sender, bucket) for _, _, sender, bucket in sorted(turns, key=lambda turn: turn[:3])]


def mixed(units: Sequence[Unit]) -> list[Unit]:
    """Units such that those of every stage and of every expert-parallel rank are spread evenly by bytes over the whole.

    So the ranks that hold the parts of a bucket are as many as can be, and all of their links carry it.
    """
    totals: dict[tuple[int, int | None], int] = {}
    for unit in units:
        key = unit[0].stage, unit[0].ep
        totals[key] = totals.get(key, 0) + nbytes_of(unit)
    passed = dict.fromkeys(totals, 0)
    turns = []
    for number, unit in enumerate(units):
        key = unit[0].stage, unit[0].ep
        turns.append(((passed[key] + nbytes_of(unit) / 2) / totals[key], number, unit))
        passed[key] += nbytes_of(unit)
    return [unit for _, _, unit in sorted(turns, key=lambda turn: turn[:2])]
