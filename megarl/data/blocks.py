"""Samples, and rows of supervised training, as blocks: a record of 9 bytes a token for each sequence.

A block holds what one process has of a shard. A sample's record is made as it arrives; a block only refers to it, so that
nothing is copied between the last answer and the object store. Not for what shards are made of (deal.py), nor for shards
(pack.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megarl.core.types import RECORD_BYTES, Block, FloatArray, Image, IntArray, Record, RoutingArray, Sample

if TYPE_CHECKING:
    from megarl.data.sft import Demonstration  # ranks have blocks, and read no rows


def memory_of(
    tokens: Sequence[NDArray[np.integer[Any]]],
    first: int,
    mask: NDArray[np.uint8],
    logprobs: FloatArray | None = None,
) -> NDArray[np.uint8]:
    """The memory of a new Record: [9 L].

    tokens: its token ids, in pieces. mask, logprobs: [m], of the labels at positions `first` to `first + m`; 0 elsewhere.
    """
    length, here = sum(map(len, tokens)), slice(first, first + len(mask))
    assert first >= 0 and here.stop <= length, (first, len(mask), length)
    memory = np.zeros(RECORD_BYTES * length, np.uint8)
    record = Record.of(memory)
    np.concatenate(tokens, out=record.tokens, casting="same_kind")
    record.loss_mask[here] = mask
    if logprobs is not None:
        np.copyto(record.rollout_logprobs[here], logprobs, where=mask > 0)
    return memory


def laid(sample: Sample) -> Sample:
    """The sample with its arrays in one record: what it holds is what its block refers to. Not an empty prompt.

    Its log-probs are 0 outside of its mask.
    """
    _check(sample)
    prompt = sample.prompt.token_ids
    response = slice(len(prompt) - 1, sample.num_tokens - 1)
    memory = memory_of((prompt, sample.response_ids), response.start, sample.loss_mask, sample.rollout_logprobs)
    record = Record.of(memory)
    return replace(
        sample,
        response_ids=record.tokens[len(prompt) :],
        loss_mask=record.loss_mask[response],
        rollout_logprobs=record.rollout_logprobs[response],
        memory=memory,
    )


def sample_block(
    samples: Sequence[Sample],
    indices: IntArray,
    weights: FloatArray,
    turns: tuple[FloatArray, ...] | None = None,
    first_turns: tuple[int, ...] | None = None,
) -> Block:
    """Samples as they lie in one process, in the given order. None may have an empty prompt. Those laid are not copied.

    indices, weights: [n], of each sample: its number in the step, and what each of its trained tokens counts for.
    turns, first_turns: [n], see Block.
    """
    memories = [_memory(sample) for sample in samples]
    others = {"routing": _routing(samples), "turns": turns, "first_turns": first_turns, "starts": _starts(samples)}
    return _block(memories, indices, weights, **others, images=_images(samples))


def row_block(
    rows: Sequence[Demonstration],
    indices: IntArray,
    weights: FloatArray,
    margins: FloatArray | None = None,
    *,
    desirable: FloatArray | None = None,
    scored: bool = False,
) -> Block:
    """Rows of supervised training, as `sample_block`. margins, desirable: [n], see Block; scored: see `pack_pairs`.

    Of an image it has where that is, not its pixels, which ranks make: they would grow with the tokens, in one process.
    """
    last = np.ones(1, np.uint8)
    memories = [
        memory_of((row.token_ids,), len(row.token_ids) - 1, last)
        if scored
        else memory_of((row.token_ids,), 0, row.loss_mask[1:])
        for row in rows
    ]
    images = tuple(tuple(map(_anywhere, row.images)) for row in rows) if any(row.images for row in rows) else None
    return _block(memories, indices, weights, margins=margins, desirable=desirable, images=images)


def _anywhere(image: Image) -> Image:
    """The image, for a process that is in another folder."""
    return image if isinstance(image.source, bytes) else replace(image, source=image.source.absolute())


def _block(memories: Sequence[NDArray[np.uint8]], indices: IntArray, weights: FloatArray, **others: Any) -> Block:
    assert len(memories) == len(indices) == len(weights), (len(memories), len(indices), len(weights))
    return Block(tuple(memories), weights.astype(np.float32), indices.astype(np.int64), **others)


def _check(sample: Sample) -> None:
    assert len(sample.prompt.token_ids), f"sample {sample.id} has an empty prompt"
    assert len(sample.loss_mask) == len(sample.rollout_logprobs) == len(sample.response_ids), (
        f"sample {sample.id}: {len(sample.response_ids)} response tokens, {len(sample.loss_mask)} mask entries, "
        f"{len(sample.rollout_logprobs)} log-probs"
    )


def _memory(sample: Sample) -> NDArray[np.uint8]:
    """Of the sample's record; a new one where it has none."""
    _check(sample)
    if sample.memory is None:
        sample = laid(sample)
    memory = sample.memory
    assert memory is not None
    parts = (sample.response_ids, sample.loss_mask, sample.rollout_logprobs)
    assert all(part.base is memory for part in parts), f"sample {sample.id}: an array was replaced beside its record"
    return memory


def _routing(samples: Sequence[Sample]) -> tuple[RoutingArray | None, ...] | None:
    """What each says of its tokens; None where none does. Of last tokens no server knows: none has put them through."""
    routing = tuple(sample.routing for sample in samples)
    widths = {each.shape[1] for each in routing if each is not None}
    if not widths:
        return None
    assert len(widths) == 1, widths
    for sample in samples:
        rows = 0 if sample.routing is None else len(sample.routing)
        assert rows <= sample.num_tokens, (sample.id, rows, sample.num_tokens)
    return routing


def _starts(samples: Sequence[Sample]) -> tuple[tuple[int, ...], ...] | None:
    """Where further sequences of each begin, in positions of its record; None where none has any."""
    if not any(sample.starts for sample in samples):
        return None
    return tuple(tuple(len(sample.prompt.token_ids) + start for start in sample.starts) for sample in samples)


def _images(samples: Sequence[Sample]) -> tuple[tuple[bytes, ...], ...] | None:
    """Those of each; None where none has any."""
    for sample in samples:
        wanted = len(sample.prompt.images) + len(sample.shown)
        assert len(sample.images) == wanted, (
            f"sample {sample.id} is without its images: {len(sample.images)} of {wanted}"
        )
    return tuple(sample.images for sample in samples) if any(sample.images for sample in samples) else None


def joined(parts: Sequence[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    """End to end; nothing where there are no parts."""
    return np.concatenate([np.zeros(0, dtype), *parts], dtype=dtype)
