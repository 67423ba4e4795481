"""What a rank's passes see of images: the features of a batch's images, dealt as the layout deals its tokens.

Of a tower that learns, the gradients of features are added up over a mini-batch, image by image, whatever passes see them and
however often layers are computed again. Then the tower sees each image once more, and learns what is asked of its features.

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
from megarl.training.parallel import Groups
from megarl.training.spec import RoleSpec


class ImageFeatures:
    """Of one role on one rank. Without a tower where none of its layers needs features. learns: the tower does, too."""

    def __init__(self, tower: Tower | None, groups: Groups, *, learns: bool = False) -> None:
        self._tower, self._groups, self._learns = tower, groups, learns
        self._asked: dict[Hashable, _Asked] = {}

    @property
    def frozen(self) -> list[Module]:
        """A tower in front of the model, whose parameters are on the device as well."""
        return [] if self._tower is None or self._learns else [self._tower.module]

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
        layout, tp_rank = self._groups.layout, self._groups.place.tp
        if layout.sequence_parallel:
            part = batch.num_tokens // layout.tp
            mine = rows // part == tp_rank
            rows, squares = rows[mine] - tp_rank * part, squares[mine]
        return Seen(images.positions, rows, self._features(images.pictures, squares))

    def learn(self) -> None:
        """Behind a mini-batch's passes: the tower's gradients. Its weights then change: what is kept of images goes.

        Collective over tensor parallel, also where a mini-batch shows no images.
        """
        if self._tower is None or not self._learns:
            return
        with torch.enable_grad():
            for asked in self._asked.values():
                features = self._tower.see(asked.picture)
                features.backward(asked.gradient.to(features.dtype))
        self._asked.clear()
        self._tower.forget()
        if self._groups.layout.tp > 1 and not self._groups.layout.sequence_parallel:
            self._agree()

    def _agree(self) -> None:
        """Give all ranks of tensor parallel the first one's gradients of the tower, which they have of the same squares.

        On devices attention's backward adds up in no certain order: the towers of the ranks would drift apart.
        """
        assert self._tower is not None
        first = dist.get_global_rank(self._groups.tp, 0)
        for parameter in self._tower.module.parameters():
            kept: Any = parameter  # as Megatron's data parallel has marked it
            dist.broadcast(kept.main_grad, first, group=self._groups.tp)

    def _features(self, pictures: Sequence[Picture], squares: Tensor) -> Tensor | None:
        """[1 + deepstack, n, hidden], of these of all squares of the images."""
        if self._tower is None:
            return None
        each = [self._tower.features(picture) for picture in pictures]
        found = torch.cat(each, dim=1)[:, squares]
        if self._learns and torch.is_grad_enabled() and len(squares):
            found.requires_grad_()
            take = partial(self._take, pictures, [features.shape[1] for features in each], squares)
            found.register_post_accumulate_grad_hook(take)
        return found

    def _take(self, pictures: Sequence[Picture], sizes: Sequence[int], squares: Tensor, features: Tensor) -> None:
        """Add the gradient of features to what is asked of each picture's. sizes: squares of each picture."""
        gradient = features.grad
        assert gradient is not None
        features.grad = None  # each layer that is computed again gives its own part
        whole = gradient.new_zeros(len(gradient), sum(sizes), gradient.shape[2], dtype=torch.float32)
        whole.index_copy_(1, squares, gradient.float())
        for picture, part in zip(pictures, whole.split(list(sizes), dim=1), strict=True):
            asked = self._asked.get(key := picture_key(picture))
            if asked is None:
                self._asked[key] = _Asked(picture, part.clone())
            else:
                asked.gradient.add_(part)


@dataclass(frozen=True)
class _Asked:
    """What a mini-batch asks of a picture's features: [1 + deepstack, squares, hidden] float32."""

    picture: Picture
    gradient: Tensor


def make_image_features(
    chunks: Sequence[Any], config: ModelConfig, spec: RoleSpec, dtype: torch.dtype, device: str, groups: Groups
) -> ImageFeatures | None:
    """With the role's tower where a virtual stage needs features; None for a model of text."""
    vision = config.vision
    if vision is None:
        return None
    # A model that is only converted sees nothing.
    wanted = spec.load_weights and any(needs_features(chunk, vision) for chunk in chunks)
    if not wanted:
        return ImageFeatures(None, groups)
    learns = bool(vision.tower)
    module = chunks[0].vision_tower if learns else load_tower(spec.folder, dtype, device)
    return ImageFeatures(Tower(module, spec.folder, dtype, device), groups, learns=learns)
