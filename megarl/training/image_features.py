"""What a rank's passes see of images: the features of a batch's images, dealt as the layout deals its tokens.

Of a tower that learns, the gradients of features are added up over a mini-batch, image by image, whatever passes see them and
however often layers are computed again. Then the tower sees each image once more, and learns what is asked of its features. The
ranks of tensor parallel, which see the same images, share that out.

Import only after `models.bootstrap.prepare_megatron`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from megarl.core.types import Picture
from megarl.models.config import ModelConfig
from megarl.models.seen import Seen, needs_features
from megarl.models.vision_tower import Tower, load_tower, picture_key
from megarl.training.batch import DeviceBatch
from megarl.training.exports import main_grad
from megarl.training.parallel import Groups
from megarl.training.spec import RoleSpec


class ImageFeatures:
    """Of one role on one rank. Without a tower where no layer needs features. is_part: the model has the tower in it."""

    def __init__(self, tower: Tower | None, groups: Groups, *, is_part: bool = False) -> None:
        self._tower, self._layout, self._tp, self._is_part = tower, groups.layout, groups.tp, is_part
        self._tp_rank = groups.place.tp
        self._asked: dict[Hashable, _Asked] = {}

    @property
    def frozen(self) -> list[Module]:
        """A tower in front of the model, whose parameters are on the device as well."""
        return [] if self._tower is None or self._is_part else [self._tower.module]

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

    def learn(self) -> None:
        """Behind a mini-batch's passes: the tower's gradients. Its weights then change: what is kept of images goes.

        Collective over tensor parallel, whose ranks then have the same gradients to the bit, however kernels round.
        """
        if self._tower is None or not self._is_part:
            return
        if self._asked:
            self._learn_from(self._tower)
        self._asked.clear()
        self._tower.forget()  # an optimizer's momentum changes weights without any gradient, too

    def _learn_from(self, tower: Tower) -> None:
        if self._layout.sequence_parallel:  # each rank has those of its own squares
            for asked in self._asked.values():
                dist.all_reduce(asked.gradient, group=self._tp)
        with torch.enable_grad():
            for asked in list(self._asked.values())[self._tp_rank :: self._layout.tp]:
                features = tower.see(asked.picture)
                features.backward(asked.gradient.to(features.dtype))
        if self._layout.tp > 1:
            for parameter in tower.module.parameters():
                dist.all_reduce(main_grad("", parameter), group=self._tp)

    def _features(self, pictures: Sequence[Picture], squares: Tensor) -> Tensor | None:
        """[1 + deepstack, n, hidden], of these of all squares of the images."""
        if self._tower is None:
            return None
        each = [self._tower.features(picture) for picture in pictures]
        found = torch.cat(each, dim=1)[:, squares]
        if self._is_part and torch.is_grad_enabled():
            asked = [self._asked_of(picture, features) for picture, features in zip(pictures, each, strict=True)]
            found.requires_grad_().register_post_accumulate_grad_hook(partial(_take, asked, squares))
        return found

    def _asked_of(self, picture: Picture, features: Tensor) -> _Asked:
        """What the mini-batch asks of this picture's features."""
        key = picture_key(picture)
        if key not in self._asked:
            self._asked[key] = _Asked(picture, torch.zeros_like(features, dtype=torch.float32))
        return self._asked[key]


@dataclass(frozen=True)
class _Asked:
    """What a mini-batch asks of a picture's features: [1 + deepstack, squares, hidden] float32."""

    picture: Picture
    gradient: Tensor


def _take(asked: Sequence[_Asked], squares: Tensor, features: Tensor) -> None:
    """Add the gradient of a pass's features to what is asked. squares: as `Images` has them, of the pictures that are asked."""
    gradient = features.grad
    assert gradient is not None
    features.grad = None  # each layer that is computed again gives its own part
    sizes = [each.gradient.shape[1] for each in asked]
    whole = gradient.new_zeros(len(gradient), sum(sizes), gradient.shape[2], dtype=torch.float32)
    whole.index_copy_(1, squares, gradient.float())
    for each, part in zip(asked, whole.split(sizes, dim=1), strict=True):
        each.gradient.add_(part)


def make_image_features(
    chunks: Sequence[Any], config: ModelConfig, spec: RoleSpec, groups: Groups, dtype: torch.dtype, device: str
) -> ImageFeatures | None:
    """With the role's tower where a virtual stage needs features; None for a model of text."""
    vision = config.vision
    if vision is None:
        return None
    # A model that is only converted sees nothing.
    wanted = spec.load_weights and any(needs_features(chunk, vision) for chunk in chunks)
    if not wanted:
        return ImageFeatures(None, groups)
    is_part = bool(vision.tower)
    module = chunks[0].vision_tower if is_part else load_tower(spec.folder, dtype, device)
    return ImageFeatures(Tower(module, spec.folder, dtype, device), groups, is_part=is_part)
