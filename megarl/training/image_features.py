"""What a rank's passes see of images: the features of a batch's images, dealt as the layout deals its tokens.

Import only after `models.bootstrap.prepare_megatron`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from megarl.core.layout import Layout
from megarl.core.types import Picture
from megarl.models.config import ModelConfig
from megarl.models.seen import Seen, needs_features
from megarl.models.vision_tower import Tower
from megarl.training.batch import DeviceBatch
from megarl.training.spec import RoleSpec


class ImageFeatures:
    """Of one role on one rank. Without a tower where none of its layers needs features."""

    def __init__(self, tower: Tower | None, layout: Layout, tp_rank: int) -> None:
        self._tower, self._layout, self._tp_rank = tower, layout, tp_rank

    @property
    def modules(self) -> list[Module]:
        """Those whose parameters are on the device."""
        return [] if self._tower is None else [self._tower.module]

    def forget(self) -> None:
        """Let go of what is kept of images on the device."""
        if self._tower is not None:
            self._tower.forget()

    def of(self, batch: DeviceBatch) -> Seen | None:
        """What a pass over the batch sees; None where it is text alone."""
        images = batch.images
        if images is None:
            return None
        rows, squares = images.rows, images.squares
        if self._layout.sequence_parallel:
            part = batch.num_tokens // self._layout.tp
            mine = rows // part == self._tp_rank
            rows, squares = rows[mine] - self._tp_rank * part, squares[mine]
        return Seen(images.positions, rows, self._features(images.pictures, squares))

    def _features(self, pictures: Sequence[Picture], squares: Tensor) -> Tensor | None:
        """[1 + deepstack, n, hidden], of these of all squares of the images."""
        if self._tower is None:
            return None
        return torch.cat([self._tower.features(picture) for picture in pictures], dim=1)[:, squares]


def make_image_features(
    chunks: Sequence[Any], config: ModelConfig, spec: RoleSpec, dtype: torch.dtype, device: str, tp_rank: int
) -> ImageFeatures | None:
    """With the tower of the role's HF folder where a virtual stage needs features; None for a model of text."""
    vision = config.vision
    if vision is None:
        return None
    # A model that is only converted sees nothing.
    wanted = spec.load_weights and any(needs_features(chunk, vision) for chunk in chunks)
    return ImageFeatures(Tower(spec.folder, dtype, device) if wanted else None, spec.layout, tp_rank)
