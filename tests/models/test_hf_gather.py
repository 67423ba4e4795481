"""Gathering between ranks that are threads: what each holds meanwhile, and that nobody waits for what nobody sends."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.models import hf_gather
from megarl.models.hf_gather import Gatherer, Places
from megarl.models.hf_weights import Unit
from megarl.models.parts import Part
from megarl.models.rules import Rule, Source
from tests.support.live_bytes import LiveBytes
from tests.support.whole_tensors import merge

Links = dict[tuple[int, int], "Queue[Tensor]"]


def rule(name: str, shape: tuple[int, int], cut: Any) -> Rule:
    return Rule(name, (Source(name, shape),), cut, rounds=1, is_padded=False, layer=0)


class HeldByThread:
    """A rank's parts of whole tensors."""

    def __init__(self, parts: dict[str, Tensor]) -> None:
        self.parts = parts

    def value(self, of: Rule, part: Part) -> Tensor:
        return self.parts[of.megatron]


def gatherer(rank: int, rules: Sequence[Rule], parts: dict[str, Tensor], link: Link) -> Gatherer:
    made: Any = object.__new__(Gatherer)
    made._held, made._rank, made._group, made._dtypes = HeldByThread(parts), rank, link, {}
    made.dtype, made._device = torch.float32, torch.device("cpu")
    made._units = {each.megatron: Unit(each, 0) for each in rules}
    return made  # type: ignore[no-any-return]


class Link:
    """A rank's end of the threads' links, in the process group's place."""

    def __init__(self, rank: int, links: Links) -> None:
        self.rank, self.links = rank, links


class PassingDist:
    """torch.distributed's point-to-point operations between threads: what is sent is there at once."""

    isend, irecv = "isend", "irecv"

    def P2POp(self, kind: str, tensor: Tensor, group: Link, group_peer: int) -> Any:
        assert tensor.is_contiguous()
        return kind, tensor, group, group_peer

    def batch_isend_irecv(self, operations: Sequence[Any]) -> list[Any]:
        for kind, tensor, link, peer in operations:
            if kind == self.isend:
                link.links[link.rank, peer].put(tensor)
        for kind, tensor, link, peer in operations:
            if kind == self.irecv:
                tensor.copy_(link.links[peer, link.rank].get(timeout=10))
        return [SimpleNamespace(wait=lambda: None)]


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(2, 4),
    to=st.integers(0, 3),
    tensors=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3), st.sampled_from(["rows", "columns"])), min_size=1),
    staged_bytes=st.integers(1, 300),
    near=st.sets(st.integers(0, 3)),
    is_placed=st.booleans(),
)
def test_a_rank_holds_its_tensors_and_at_most_so_many_bytes_of_columns(
    count: int, to: int, tensors: list[tuple[int, int, str]], staged_bytes: int, near: set[int], is_placed: bool
) -> None:
    """Of every rank, that which receives and those that give: also in rounds of a row, and of parts of several tensors.

    near: the ranks that write into its memory themselves. is_placed: whether it has memory where nobody is.
    """
    shapes = [(count * size, count * width) for size, width, _ in tensors]
    made = [rule(str(index), shape, cut) for index, (shape, (*_, cut)) in enumerate(zip(shapes, tensors, strict=True))]
    whole = [torch.arange(float(rows * columns)).view(rows, columns) for rows, columns in shapes]
    links: Links = {(one, other): Queue() for one in range(count) for other in range(count)}
    to %= count
    is_placed = is_placed or bool(near)
    place = {
        each.megatron: torch.full_like(tensor, -1.0) for each, tensor in zip(made, whole, strict=True) if is_placed
    }

    def one(rank: int) -> tuple[list[tuple[str, Tensor]], int]:
        parts = {each.megatron: merge(each, [tensor], rank, count) for each, tensor in zip(made, whole, strict=True)}
        asked = gatherer(rank, made, parts, Link(rank, links))
        places = Places({to: place} if rank in near or rank == to else {}, {to: near})
        with LiveBytes() as live:
            found = asked.gather({to: [(each.megatron, range(count)) for each in made]}, places, staged_bytes)
        return found, live.peak

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(count) as pool:
        patch.setattr(hf_gather, "dist", PassingDist())
        told = list(pool.map(one, range(count)))
    found, peak = told[to]
    assert all(tensor.equal(expected) for (_, tensor), expected in zip(found, whole, strict=True))
    assert [name for name, _ in found] == [each.megatron for each in made]
    # A row of a part is the least that arrives; what a rank had before is counted once it is looked at.
    row, own = max(4 * columns // count for _, columns in shapes), sum(tensor.nbytes for tensor in whole) // count
    words = 2 * count  # a byte each, by which ranks that share memory tell each other when
    assert peak <= sum(tensor.nbytes for tensor in whole) + own + max(staged_bytes, row) + words
    to_write = sum(tensor.nbytes for tensor in place.values())
    assert all(
        not given and held <= own + (to_write + words if rank in near else 0)
        for rank, (given, held) in enumerate(told)
        if rank != to
    )
    assert all(tensor.data_ptr() == place[name].data_ptr() for name, tensor in found if is_placed)
    assert all(link.empty() for link in links.values())


def test_what_comes_in_another_dtype_is_cast_where_it_belongs() -> None:
    """Of one who writes and one who sends, and of the rank itself; with memory for it and without."""
    links: Links = {(one, other): Queue() for one in range(3) for other in range(3)}
    of = rule("wide", (6, 6), "columns"), rule("long", (6, 6), "rows")
    whole = torch.arange(36.0).view(6, 6) / 7
    for near in ({1}, set[int]()):
        place = {each.megatron: torch.zeros(6, 6, dtype=torch.bfloat16) for each in of if near}

        def one(rank: int, near: set[int] = near, place: dict[str, Tensor] = place) -> list[tuple[str, Tensor]]:
            asked: Any = gatherer(
                rank, of, {each.megatron: merge(each, [whole], rank, 3) for each in of}, Link(rank, links)
            )
            asked._dtypes = dict.fromkeys(("wide", "long"), torch.bfloat16)
            wanted = {0: [(each.megatron, range(3)) for each in of]}
            found: list[tuple[str, Tensor]] = asked.gather(wanted, Places({0: place}, {0: near}), 20)
            return found

        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(3) as pool:
            patch.setattr(hf_gather, "dist", PassingDist())
            found, *others = pool.map(one, range(3))
        assert others == [[], []]
        assert all(torch.equal(tensor, whole.bfloat16()) for _, tensor in found)
