"""Which rows and columns of HF's tensors a rank holds, and which rank holds what. Pure arithmetic, without torch.

The rows of a rule's sources take turns (`Rule.rounds`), and ranks cut the result evenly by rows: so a rank always holds
one range of rows of each source, also where a rank's share begins in the middle of a key-value head's rows; and where a
source is several tensors, one below the other (`Source.pieces`), one range of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.core.layout import Layout, Place, dense_rank, expert_rank, stage_layers
from megarl.models.config import ModelConfig
from megarl.models.rules import Rule

ALIGNMENT = 64  # bytes: a tensor of any dtype may begin there


@dataclass(frozen=True)
class Run:
    """Neighbouring rows: [start, stop) of a source stand in the part from row `at`."""

    source: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Part:
    """What one rank holds of a rule's tensor.

    runs: in the order of the part's rows. columns: of every source; None is all. padding: rows of zeros behind the runs.
    """

    shape: tuple[int, ...]
    runs: tuple[Run, ...]
    columns: slice | None
    padding: int

    def of(self, source: int) -> list[Run]:
        """The runs of a source, in the order of its rows."""
        return sorted((run for run in self.runs if run.source == source), key=lambda run: run.start)

    def ranges(self, source: int) -> list[slice]:
        """The rows of a source that the part holds: neighbouring runs are one range."""
        found: list[slice] = []
        for run in self.of(source):
            if found and found[-1].stop == run.start:
                found[-1] = slice(found[-1].start, run.stop)
            else:
                found.append(slice(run.start, run.stop))
        return found


def num_parts(rule: Rule, layout: Layout) -> int:
    """Over how many ranks a rule's tensor is cut."""
    if rule.cut == "whole":
        return 1
    return layout.tp if rule.expert is None else layout.etp


def part_of(rule: Rule, index: int, count: int) -> Part:
    """The part `index` of `count` of a rule's tensor. Sizes that do not divide are a broken promise of the layout check."""
    shape = rule.sources[0].shape
    total = sum(source.shape[0] for source in rule.sources)
    if rule.cut == "columns":
        width, rest = divmod(shape[1], count)
        assert rest == 0, (rule.megatron, shape, count)
        columns = slice(index * width, (index + 1) * width)
        return Part((total, width), tuple(_runs(rule, count, 0, total)), columns, 0)
    rows, rest = divmod(total, count)
    assert rest == 0 or rule.is_padded, (rule.megatron, total, count)
    rows += rest > 0
    runs = tuple(_runs(rule, count, index * rows, (index + 1) * rows))
    padding = rows - sum(run.stop - run.start for run in runs)
    return Part((rows, *shape[1:]), runs, None, padding)


def _runs(rule: Rule, count: int, low: int, high: int) -> Iterator[Run]:
    """Runs of the rows [low, high) of the whole tensor."""
    rounds = rule.rounds or count
    blocks = []  # source, its row where a piece begins, rows of the piece in a turn
    for number, source in enumerate(rule.sources):
        begins = 0
        for rows in source.blocks:
            block, rest = divmod(rows, rounds)
            assert rest == 0, (rule.megatron, source, rounds)
            blocks.append((number, begins, block))
            begins += rows
    turn = sum(block for _, _, block in blocks)
    for index in range(low // turn, min(rounds, -(-high // turn))):
        position = index * turn
        for number, begins, block in blocks:
            start, stop = max(position, low), min(position + block, high)
            if start < stop:
                offset = begins + index * block - position
                yield Run(number, start + offset, stop + offset, start - low)
            position += block


class Dealing:
    """Who holds which rule's tensor in a layout."""

    def __init__(self, config: ModelConfig, layout: Layout) -> None:
        self._layout = layout
        self._stage = {
            layer: stage
            for stage, ranges in enumerate(stage_layers(layout, config.num_layers))
            for layers in ranges
            for layer in layers
        }
        self._experts_each = config.moe.num_experts // layout.ep if config.moe is not None else 1

    def is_held(self, rule: Rule, place: Place) -> bool:
        """Whether a rank at this place holds a part."""
        mine = rule.expert is None or rule.expert // self._experts_each == place.ep
        return mine and self._stage[rule.layer] == place.pp

    def part(self, rule: Rule, place: Place) -> Part:
        """The part that a rank at this place holds."""
        count = num_parts(rule, self._layout)
        index = place.tp if rule.expert is None else place.etp
        return part_of(rule, index if count > 1 else 0, count)

    def holders(self, rule: Rule) -> list[int]:
        """The rank of each part in the first copy of the model."""
        stage, parts = self._stage[rule.layer], range(num_parts(rule, self._layout))
        if rule.expert is None:
            return [dense_rank(self._layout, tp=part, pp=stage) for part in parts]
        ep = rule.expert // self._experts_each
        return [expert_rank(self._layout, etp=part, ep=ep, pp=stage) for part in parts]


def first_copy(layout: Layout) -> tuple[int, ...]:
    """The ranks that hold the model's first copy: the holders of all rules, whatever the model."""
    dense = {dense_rank(layout, tp=tp, pp=pp) for tp in range(layout.tp) for pp in range(layout.pp)}
    experts = {
        expert_rank(layout, etp=etp, ep=ep, pp=pp)
        for etp in range(layout.etp)
        for ep in range(layout.ep)
        for pp in range(layout.pp)
    }
    return tuple(sorted(dense | experts))
