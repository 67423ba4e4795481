"""A multimodal model's vision tower, as transformers has it: frozen in front of Megatron's model, or a part of it that learns.

It turns an image that has been fitted (vision.py) into features. Those of one image do not depend on others: each goes alone.
"""

from __future__ import annotations

import hashlib
import importlib
import io
from collections import OrderedDict
from collections.abc import Hashable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.checkpoint import checkpoint

from megarl.core.errors import UserError
from megarl.core.json_file import read_object
from megarl.core.loading import without_collection
from megarl.core.stand_in import standing_in
from megarl.core.types import Picture
from megarl.data.images import pixels
from megarl.models.hf_read import HfReader
from megarl.models.multimodal import tower_names
from megarl.models.tower_files import tower_index
from megarl.models.weight_files import AGAIN, some

if TYPE_CHECKING:
    import PIL.Image  # loaded where an image is looked at

# Of a config.json's model_type: where transformers has the tower, and what it is called there.
TOWERS = {
    "qwen2_vl": ("qwen2_vl.modeling_qwen2_vl", "Qwen2VisionTransformerPretrainedModel"),
    "qwen2_5_vl": ("qwen2_5_vl.modeling_qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel"),
    "qwen3_vl": ("qwen3_vl.modeling_qwen3_vl", "Qwen3VLVisionModel"),
    "qwen3_5": ("qwen3_5.modeling_qwen3_5", "Qwen3_5VisionModel"),
    "qwen3_5_moe": ("qwen3_5_moe.modeling_qwen3_5_moe", "Qwen3_5MoeVisionModel"),
    "qwen3_vl_moe": ("qwen3_vl_moe.modeling_qwen3_vl_moe", "Qwen3VLMoeVisionModel"),
}
PROCESSOR = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
KEPT_BYTES = 2**29


class Tower:
    """Makes features of images. The last ones are kept: samples of a group have the same image."""

    def __init__(
        self, module: Module, folder: Path, dtype: torch.dtype, device: str, kept_bytes: int = KEPT_BYTES
    ) -> None:
        """module: as `make_tower` or `load_tower` gives it. folder: which says how images are cut."""
        self.module = module
        self._process = _loaded(PROCESSOR).Qwen2VLImageProcessorPil.from_pretrained(folder)
        self._dtype, self._device, self._kept_bytes = dtype, device, kept_bytes
        self._kept: OrderedDict[Hashable, Tensor] = OrderedDict()

    def features(self, picture: Picture) -> Tensor:
        """[1 + deepstack, squares, hidden] of an image, row by row: for the embedding's place, and for the first layers.

        picture: of a size that is the model's. Raises UserError for an image of a row that cannot be decoded.
        """
        key = picture_key(picture)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        with torch.no_grad():
            self._kept[key] = found = self.see(picture)
        while sum(each.nbytes for each in self._kept.values()) > self._kept_bytes and len(self._kept) > 1:
            self._kept.popitem(last=False)
        return found

    def forget(self) -> None:
        """Let go of the features that are kept."""
        self._kept.clear()

    def see(self, picture: Picture) -> Tensor:
        """The same, made anew: where gradients are on, the tower's weights learn through it."""
        with _opened(picture) as image:
            patches = self._process(images=[image], do_resize=False, return_tensors="pt")
        values = patches["pixel_values"].to(self._device, self._dtype)
        output = self.module(values, grid_thw=patches["image_grid_thw"].to(self._device))
        return torch.stack([output.pooler_output, *getattr(output, "deepstack_features", ())])


def picture_key(picture: Picture) -> Hashable:
    """By which an image is known again."""
    return hashlib.blake2b(picture, digest_size=16).digest() if isinstance(picture, bytes) else picture


def _opened(picture: Picture) -> PIL.Image.Image:
    import PIL.Image

    return PIL.Image.open(io.BytesIO(picture)) if isinstance(picture, bytes) else pixels(picture, picture.where)


def _loaded(module: str) -> Any:
    """A module of transformers, without scipy: its losses for detection name a function of it, a second of each rank's start.

    Nor scikit-learn, where it is installed: assisted generation names a function of it, and it asks scipy for its version.
    """
    with without_collection(), standing_in(("scipy", "sklearn")):
        return importlib.import_module(module)


def make_tower(folder: Path, dtype: torch.dtype, device: str, *, recomputed: bool = False) -> Module:
    """By a multimodal folder's config, on the device; what is in its weights is not set.

    recomputed: of each block its input alone is kept for backward, while the module is in training.
    """
    raw = read_object(folder / "config.json", AGAIN)
    module, name = TOWERS[raw["model_type"]]
    make: Any = getattr(_loaded(f"transformers.models.{module}"), name)
    config = _loaded("transformers").CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw)).vision_config
    with _loaded("transformers.initialization").no_init_weights(), torch.device(device):
        tower: Module = make._from_config(config, dtype=dtype, attn_implementation="sdpa")
    if recomputed:
        _recompute_blocks(tower)
    return tower.eval()


def _recompute_blocks(tower: Module) -> None:
    """As a whole model's `gradient_checkpointing_enable` does, which would look for embeddings of tokens as well."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    # Towers draw no random numbers, and their blocks keep the same tensors each time.
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, determinism_check="none")
    for block in tower.modules():
        if isinstance(block, GradientCheckpointingLayer):
            block.gradient_checkpointing, block._gradient_checkpointing_func = True, again


def load_tower(folder: Path, dtype: torch.dtype, device: str) -> Module:
    """The same, frozen, with the weights of the folder, which are the config's. Raises UserError where they are no numbers."""
    tower = make_tower(folder, dtype, device)
    _fill(tower, folder)
    return tower.requires_grad_(False)


def _fill(tower: Module, folder: Path) -> None:
    index = tower_index(folder)
    names = tower_names(index)
    with HfReader(index, check_finite=True) as reader, torch.no_grad():
        for name, parameter in tower.named_parameters():
            reader.read(names[name], slice(0, parameter.shape[0]), None, parameter)
        if not_finite := reader.finish():
            raise UserError(f"Weights in {folder} are NaN or infinite: {some(not_finite)}. {AGAIN}")
