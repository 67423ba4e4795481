"""How a recipe bounds what its model sees, and what it cannot ask of a model of text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megarl.core.errors import UserError
from megarl.models.recipe_vision import sight_of
from megarl.models.vision import Vision
from megarl.recipe.dataset import DataSet
from megarl.recipe.schema import Data
from megarl.recipe.supervised import PairData, SftData, UnpairedData
from tests.models.configs import PLAIN

SEES = replace(PLAIN, vision=Vision(3, 1, 2, square=4, least_pixels=32, most_pixels=320, axes=(2, 3, 3)))


def data(kind: type[DataSet] = Data, **keys: Any) -> Any:
    return kind(train="rows.jsonl", **keys)


@pytest.mark.parametrize("kind", [Data, SftData, PairData, UnpairedData])
def test_images_are_as_the_models_files_say_or_smaller(kind: type[DataSet]) -> None:
    assert sight_of(SEES, data(kind)) == sight_of(SEES, data(kind, images_key=None)) == SEES.vision
    assert sight_of(SEES, data(kind, max_image_pixels=9999)) == SEES.vision
    found = sight_of(SEES, data(kind, max_image_pixels=64))
    assert found is not None and found.fitted(40, 40) == (8, 8)
    assert found == replace(SEES.vision, most_pixels=64)
    with pytest.raises(
        UserError, match=r"data.max_image_pixels 31: no image comes to the model with less than 32 pixels"
    ):
        sight_of(SEES, data(kind, max_image_pixels=31))


@pytest.mark.parametrize("kind", [Data, SftData, PairData, UnpairedData])
def test_a_model_of_text_is_shown_nothing(kind: type[DataSet]) -> None:
    assert sight_of(PLAIN, data(kind)) is sight_of(PLAIN, data(kind, images_key=None)) is None
    for key, value in (("images_key", "pictures"), ("max_image_pixels", 64)):
        with pytest.raises(UserError, match=rf"data.{key}: the model sees no images. Remove the key"):
            sight_of(PLAIN, data(kind, **{key: value}))
