"""What a collector hands over of the samples that a step takes: blocks, and the columns that came with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from megarl.core.errors import MegarlError
from megarl.core.types import Block, FloatArray, Sample
from megarl.data.blocks import sample_block
from megarl.rollout.batcher import Part
from megarl.rollout.turns import turns_before, turns_of


def blocks_of(part: Part, samples: Sequence[Sample], *, by_turn: bool = False) -> tuple[Block, ...]:
    """A block for each shard of a step. samples: those of the part, in its order. by_turn: whether turns are rewarded."""
    blocks = []
    for indices, at in zip(part.blocks, _places(part), strict=True):
        chosen = [_masked(samples[each], part.oldest) for each in at]
        turns = tuple(turns_of(samples[each]) for each in at) if by_turn else None
        passed = tuple(turns_before(samples[each], now) for each, now in zip(at, chosen, strict=True))
        blocks.append(sample_block(chosen, indices, part.weights[at], turns, passed if any(passed) else None))
    return tuple(blocks)


def _masked(sample: Sample, oldest: int) -> Sample:
    """The sample without its tokens of versions before `oldest` among those that are trained on."""
    old = [span for span in sample.versions if span.version < oldest]
    if not old:
        return sample
    mask = sample.loss_mask.copy()
    for span in old:
        mask[span.start : span.end] = 0
    return replace(sample, loss_mask=mask, memory=None)


def columns_of(part: Part, samples: Sequence[Sample], shapes: Mapping[str, tuple[int, ...]]) -> tuple[FloatArray, ...]:
    """Of each column that came with the samples, one array a shard, [T, ..] in the order of its block.

    samples: as of `blocks_of`. shapes: by name, what follows [T]. Raises MegarlError where a sample has none of it.
    """
    return tuple(
        np.concatenate([np.zeros((0, *rest), np.float32), *(_column(samples[each], name, rest) for each in at)])
        for name, rest in shapes.items()
        for at in _places(part)
    )


def _places(part: Part) -> list[list[int]]:
    """Of each shard, where its samples are among those of the part."""
    number = {int(index): at for at, index in enumerate(part.indices)}
    return [[number[int(index)] for index in indices] for indices in part.blocks]


def _column(sample: Sample, name: str, rest: tuple[int, ...]) -> FloatArray:
    """A column of one sample, label-aligned as its record: [L, ..]."""
    found, first = sample.columns.get(name), len(sample.prompt.token_ids) - 1
    if found is None or found.shape[1:] != rest:
        raise MegarlError(f"Nobody has asked a teacher for the {name} of sample {sample.id}: sample it anew.")
    column = np.zeros((sample.num_tokens, *rest), np.float32)
    column[first : first + len(found)] = found
    return column
