"""Labelled answers for the engine's tests: random examples, each desirable or not, and the ways to cut them into shards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megarl.core.types import Column, MicroBatch, MiniBatch, Shard
from tests.training.samples import Example, to_micro_batch

DESIRABLE = (True, False, False)  # in turn


def is_desirable(index: int) -> bool:
    """The label of a mini-batch's answer of that number."""
    return DESIRABLE[index % len(DESIRABLE)]


def labelled_shards(
    mini: list[Example], dp: int = 1, micro_batches: int = 1, *, further: float = 0.0
) -> tuple[list[Shard], list[dict[str, Column]]]:
    """A mini-batch of answers assigned to dp shards, each cut into micro-batches, and the columns `ref_logprobs` of each.

    further: how much less the reference says of each token than the examples have it.
    """
    numbered = list(enumerate(mini))
    parts, columns = [], []
    for index in range(dp):
        mine = numbered[index::dp]
        cuts = [mine[first::micro_batches] for first in range(micro_batches)]
        parts.append(Shard((MiniBatch(tuple(_pack(cut, len(mini)) for cut in cuts)),)))
        columns.append({"ref_logprobs": [[_reference(cut) - np.float32(further) for cut in cuts]]})
    return parts, columns


def _reference(cut: list[tuple[int, Example]]) -> np.ndarray:
    return np.concatenate([each.columns["ref_logprobs"] for _, each in cut])


def _pack(cut: list[tuple[int, Example]], num_rows: int) -> MicroBatch:
    mine = [example for _, example in cut]
    weights = [example.mask / max(1, example.mask.sum()) / num_rows for example in mine]
    return replace(
        to_micro_batch(mine, 1.0),
        weights=np.concatenate(weights).astype(np.float32),
        desirable=np.array([is_desirable(number) for number, _ in cut], np.float32),
    )
