"""How a recipe's rows are shown to its model: as its files say, and the recipe bounds it. Without torch."""

from __future__ import annotations

from dataclasses import replace

from megarl.core.errors import UserError
from megarl.models.config import ModelConfig
from megarl.models.vision import Vision
from megarl.recipe.schema import Data
from megarl.recipe.supervised import RowData

IMAGES_KEY = Data.model_fields["images_key"].default


def sight_of(model: ModelConfig, data: Data | RowData) -> Vision | None:
    """None for a model that sees no images. Raises UserError where the recipe says what the model cannot do."""
    vision, most = model.vision, data.max_image_pixels
    if vision is None:
        asked = {
            "max_image_pixels": most is not None,
            "images_key": data.images_key is not None and data.images_key != IMAGES_KEY,
        }
        for key in (key for key, given in asked.items() if given):
            raise UserError(f"data.{key}: the model sees no images. Remove the key, or name a model that does.")
        return None
    if most is None:
        return vision
    if most < vision.least_pixels:
        raise UserError(
            f"data.max_image_pixels {most}: no image comes to the model with less than {vision.least_pixels} pixels. Set it to "
            "at least that, or remove the key."
        )
    return replace(vision, most_pixels=min(vision.most_pixels, most))
