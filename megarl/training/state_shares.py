"""A distributed optimizer's state as whole parameters, each on one data-parallel rank, and back to the parts that ranks keep.

Megatron splits the state by position in the gradient buffers, so that a rank holds some parameters in part, while a
checkpoint that every layout reads has them whole. Megatron itself gathers all of them in the host memory of one rank, or of
every rank, and reads all of them on every rank: 12 bytes for each parameter of a model-parallel rank, however many
data-parallel ranks there are. Here each of these takes some of the parameters, of about the same size in all; no rank sends
or takes more than that share. Import only after `models.bootstrap.prepare_megatron`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

STATES = ("param", "exp_avg", "exp_avg_sq")  # what Adam keeps of a parameter, in Megatron's names
ROUND = 1 << 26  # elements that all ranks together send at once: 256 MiB, the most that one of them may have to take


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of a parameter, flat. parameter: its number. holder: who keeps them. owner: who takes it whole."""

    parameter: int
    start: int
    stop: int
    holder: int
    owner: int

    @property
    def numel(self) -> int:
        """How many elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter lies: elements [start, stop) of its buffer, in a bucket of `numel` elements from `offset` on."""

    start: int
    stop: int
    offset: int
    numel: int


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Who takes which parameter: the largest first, each to whom has least so far. sizes: elements of each."""
    taken, chosen = [0] * ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        chosen[index] = min(range(ranks), key=lambda rank: taken[rank])
        taken[chosen[index]] += sizes[index]
    return chosen


def pieces(places: Sequence[Place], ranks: int) -> list[Piece]:
    """All parameters, cut where one rank's part of a bucket ends and the next one's begins. All parts are of the same size."""
    chosen = owners([place.stop - place.start for place in places], ranks)
    found = []
    for index, place in enumerate(places):
        part = place.numel // ranks
        at = place.start
        while at < place.stop:
            holder = (at - place.offset) // part
            stop = min(place.stop, place.offset + (holder + 1) * part)
            found.append(Piece(index, at - place.start, stop - place.start, holder, chosen[index]))
            at = stop
    return found


def rounds(all_pieces: Iterable[Piece], ranks: int, most: int = ROUND) -> list[list[Piece]]:
    """The pieces in the order of their exchange. most: elements of all ranks in one round; each sends a fair part of it."""
    part = max(1, most // ranks)
    planned: list[list[Piece]] = []
    filled = [0] * ranks  # elements of each holder so far
    for piece in all_pieces:
        at = piece.start
        while at < piece.stop:
            number, done = divmod(filled[piece.holder], part)
            stop = min(piece.stop, at + part - done)
            if number == len(planned):
                planned.append([])
            planned[number].append(replace(piece, start=at, stop=stop))
            filled[piece.holder] += stop - at
            at = stop
    return planned


Ways = list[tuple[int, Piece]]  # each with the other rank
Memory = Callable[[Piece], Tensor]


class StateShares:
    """The state of one of Megatron's distributed optimizers. Every data-parallel rank makes one, and the same calls."""

    def __init__(self, member: Any, most: int = ROUND) -> None:
        """member: a DistributedOptimizer with parameters, whose state exists. most: see `rounds`."""
        self._member, self._group = member, member.data_parallel_group
        self._rank, self._ranks = self._group.rank(), self._group.size()
        self._device = member.buffers[0].grad_data.device
        self.parameters: list[Any] = []  # the model's own, in the order of their numbers
        places = []
        for buffer in member.buffers:
            for parameter, (start, stop, number) in buffer.param_index_map.items():
                bucket = buffer.buckets[number]
                self.parameters.append(parameter)
                places.append(Place(start, stop, bucket.offset, bucket.grad_data.numel()))
        found = pieces(places, self._ranks)
        self._rounds = rounds(found, self._ranks, most)
        self.own = sorted({piece.parameter for piece in found if piece.owner == self._rank})
        self._held = {piece.parameter: piece for piece in found if piece.holder == self._rank}

    @property
    def alone(self) -> bool:
        """Whether there is one rank, which shares with nobody."""
        return bool(self._ranks == 1)

    def empty(self) -> dict[int, dict[str, Tensor]]:
        """Memory on the host for the parameters of this rank: by number, and by what is kept of each. [numel] float32."""
        return {
            index: {key: torch.empty(self.parameters[index].numel(), dtype=torch.float32) for key in STATES}
            for index in self.own
        }

    def gather(self) -> dict[int, dict[str, Tensor]]:
        """The parameters of this rank, as `empty` has them, filled; collective. Of one rank: the optimizer's own tensors."""
        if self.alone:
            return {index: {key: self._kept(index, key) for key in STATES} for index in self.own}
        whole = self.empty()
        for key in STATES:

            def taken(piece: Piece, key: str = key) -> Tensor:
                return whole[piece.parameter][key][piece.start : piece.stop]

            for planned in self._rounds:
                sent = [(piece.owner, piece) for piece in planned if piece.holder == self._rank]
                came = [(piece.holder, piece) for piece in planned if piece.owner == self._rank]
                self._exchange(sent, partial(self._kept_piece, key=key), came, taken)
        return whole

    def scatter(self, whole: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Let every rank have its parts of what their owners have whole, of any shape; collective."""
        for key in STATES:
            flat = {index: states[key].reshape(-1) for index, states in whole.items()}
            if self.alone:
                for index, tensor in flat.items():
                    self._kept(index, key).copy_(tensor)
                continue

            def given(piece: Piece, flat: Mapping[int, Tensor] = flat) -> Tensor:
                return flat[piece.parameter][piece.start : piece.stop]

            for planned in self._rounds:
                sent = [(piece.holder, piece) for piece in planned if piece.owner == self._rank]
                came = [(piece.owner, piece) for piece in planned if piece.holder == self._rank]
                self._exchange(sent, given, came, partial(self._kept_piece, key=key))

    def differing(self, whole: Mapping[int, Mapping[str, Tensor]]) -> int:
        """Of how many parameters the float32 weights in `whole` are not the model's own, whatever the model's dtype."""
        return sum(
            not torch.equal(
                *(each.detach().flatten().bfloat16().cpu() for each in (states["param"], self.parameters[index]))
            )
            for index, states in whole.items()
        )

    def _kept(self, index: int, key: str) -> Tensor:
        """[elements of this rank] of a parameter."""
        states = self._member._get_main_param_and_optimizer_states(self.parameters[index])
        return states[key].detach()  # type: ignore[no-any-return]

    def _kept_piece(self, piece: Piece, key: str) -> Tensor:
        first = self._held[piece.parameter].start
        return self._kept(piece.parameter, key)[piece.start - first : piece.stop - first]

    def _exchange(self, sent: Ways, source: Memory, came: Ways, target: Memory) -> None:
        """One round; collective. sent, came: what goes to whom, and comes from whom. source, target: where a piece lies here."""
        sent, came = sorted(sent, key=_peer), sorted(came, key=_peer)
        outgoing, incoming = (
            torch.empty(sum(piece.numel for _, piece in ways), dtype=torch.float32, device=self._device)
            for ways in (sent, came)
        )
        for part, piece in _parts(outgoing, sent):
            part.copy_(source(piece))
        taken, given = self._sizes(came), self._sizes(sent)
        dist.all_to_all_single(incoming, outgoing, taken, given, group=self._group)
        for part, piece in _parts(incoming, came):
            target(piece).copy_(part)

    def _sizes(self, ways: Ways) -> list[int]:
        """Elements for, or from, each rank."""
        sizes = [0] * self._ranks
        for peer, piece in ways:
            sizes[peer] += piece.numel
        return sizes


def _peer(way: tuple[int, Piece]) -> int:
    return way[0]


def _parts(flat: Tensor, ways: Ways) -> Iterator[tuple[Tensor, Piece]]:
    """Where each piece lies, one behind the other."""
    yield from zip(flat.split([piece.numel for _, piece in ways]), (piece for _, piece in ways), strict=True)
