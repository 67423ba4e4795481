"""What a pass of Megatron's model sees of images: features in the place of embeddings, and behind the first layers.

It travels with the bounds of the packed sequences, which every layer is given, also where it is computed again.
Where features come from is vision_tower.py's. Import only after `models.bootstrap.prepare_megatron`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megarl.models.vision import Vision
from megarl.models.vision_tower import make_tower


@dataclass(frozen=True)
class Seen:
    """Images of one packed pass, n of whose tokens are squares of them on this rank.

    positions: [3, T] int64, in time, row and column, of the padded sequences over all context-parallel ranks. rows: [n] int64,
    where the n are in hidden states (sequence parallel: of this rank's part). features: [1 + deepstack, n, hidden], what takes
    the place of embeddings, and what is added behind each of the first layers; None where this rank's layers need none.
    """

    positions: Tensor
    rows: Tensor
    features: Tensor | None


class Pass:
    """What the pass that is under way sees; None is text alone."""

    seen: Seen | None = None


def add_tower(chunks: Sequence[GPTModel], folder: Path, dtype: torch.dtype, device: str, *, recomputed: bool) -> None:
    """Make a vision tower a part of the model, on the stage that has the embedding; what is in its weights is not set.

    folder: with its config. recomputed: its blocks are computed again in backward.
    """
    for chunk in chunks:
        if chunk.pre_process:
            chunk.vision_tower = make_tower(folder, dtype, device, recomputed=recomputed)


def needs_features(chunk: GPTModel, vision: Vision) -> bool:
    """Whether a virtual stage has the embedding, or a layer behind which features are added."""
    return bool(chunk.pre_process) or any(layer.layer_number <= vision.deepstack for layer in chunk.decoder.layers)


def show_images(chunk: GPTModel, vision: Vision | None, under_way: Pass) -> None:
    """Let a model's passes see what their `PackedBounds.seen` says; vision: None is text alone.

    under_way: what its rotary positions read as well.
    """
    if vision is None:
        return
    chunk.register_forward_pre_hook(partial(_begin, under_way), with_kwargs=True)
    if chunk.pre_process:
        chunk.embedding.register_forward_hook(partial(_put, under_way))
    for layer in chunk.decoder.layers:
        if layer.layer_number <= vision.deepstack:
            layer.register_forward_hook(partial(_add, layer.layer_number), with_kwargs=True)


def _begin(under_way: Pass, chunk: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Before a pass. Neither embedding nor angles are computed again: what they see may be kept in one place."""
    under_way.seen = getattr(options.get("packed_seq_params"), "seen", None)


def _put(under_way: Pass, embedding: Any, given: tuple[Any, ...], output: Tensor) -> Tensor:
    """Behind the embedding: [T, 1, hidden] with features in the place of images' tokens, which then learn nothing."""
    seen = under_way.seen
    if seen is None:
        return output
    assert seen.features is not None
    return output.index_copy(0, seen.rows, seen.features[0][:, None].to(output.dtype))


def _add(number: int, layer: Any, given: tuple[Any, ...], options: dict[str, Any], output: Any) -> Any:
    """Behind a layer (from 1): its hidden states [T, 1, hidden] and whatever else it gives, with features added to images."""
    seen = getattr(options.get("packed_seq_params"), "seen", None)
    if seen is None:
        return output
    assert seen.features is not None
    hidden, *others = output
    return hidden.index_add(0, seen.rows, seen.features[number][:, None].to(hidden.dtype)), *others
