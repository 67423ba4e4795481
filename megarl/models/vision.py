"""What megarl needs to know of how a model sees images: tokens, sizes, positions. Without torch, and without any image library.

An image comes to a model at a size of whole squares, which become one token each. Sizes as Qwen2-VL has them (arXiv 2409.12191,
2.1); positions on three axes as the same paper has them (M-RoPE).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.core.errors import UserError
from megarl.core.json_file import read_object
from megarl.models.hf_fields import Fields
from megarl.models.tower_size import TowerShape, patch_size, tower_shape, tower_width
from megarl.models.tower_tensors import tower_elements

PREPROCESSOR = "preprocessor_config.json"
PROCESSOR, IMAGE_PROCESSOR = "processor_config.json", "image_processor"  # as transformers 5 writes both into one file
LONGEST_SIDE = 200  # of the shorter: what is narrower is no image for these models

# What a file of a PNG image begins with, and where its header says how large it is (RFC 2083, 4.1.1).
PNG_BEGIN = b"\x89PNG\r\n\x1a\n"
_WIDTH, _HEIGHT = slice(16, 20), slice(20, 24)

# Of transformers' Qwen2VLImageProcessor, where the file leaves them open.
_LEAST_PIXELS, _MOST_PIXELS = 56 * 56, 28 * 28 * 1280


@dataclass(frozen=True)
class Vision:
    """A model's images.

    image_token: stands for one square of an image, between start_token and end_token. square: pixels of its side. least_pixels,
    most_pixels: of an image, which is made larger or smaller until it has as many. axes: of a head's frequencies, how many turn
    by a token's place in time, by its row, and by its column. interleaved: these take turns, as far as they go. deepstack: how
    many of the first layers add what the tower saw earlier to the hidden states of images (Qwen3-VL). tower_elements: of its
    weights. tower_width: by which a server counts how large it is. tower_heads: of its attention. video_token: a server takes it
    for a place of a video, of which megarl has none. tower: the tensors of a tower that is a part of the model, because it
    learns: names behind `visual.`, and shapes. Without any it stands in front of the model, frozen. newer_names: of such a
    model's folder, as `multimodal.whole_name` has them. shape: of the tower, which says what it keeps while it learns.
    """

    image_token: int
    start_token: int
    end_token: int
    square: int
    least_pixels: int
    most_pixels: int
    axes: tuple[int, int, int]
    interleaved: bool = False
    deepstack: int = 0
    tower_elements: int = 0
    tower_width: int = 1024
    tower_heads: int = 16
    video_token: int | None = None
    tower: tuple[tuple[str, tuple[int, ...]], ...] = ()
    newer_names: bool = False
    shape: TowerShape | None = None

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """Width and height at which an image of this size comes to the model. Raises ValueError for one that is too narrow."""
        if min(width, height) < 1 or max(width, height) > LONGEST_SIDE * min(width, height):
            raise ValueError(
                f"{width} x {height} pixels: the longer side is more than {LONGEST_SIDE} times the shorter one"
            )
        sides = tuple(round(side / self.square) * self.square for side in (width, height))
        if math.prod(sides) > self.most_pixels:
            shrink = math.sqrt(width * height / self.most_pixels)
            sides = tuple(max(1, math.floor(side / shrink / self.square)) * self.square for side in (width, height))
        elif math.prod(sides) < self.least_pixels:
            grow = math.sqrt(self.least_pixels / (width * height))
            sides = tuple(math.ceil(side * grow / self.square) * self.square for side in (width, height))
        return sides[0], sides[1]

    def num_tokens(self, width: int, height: int) -> int:
        """Image tokens of an image that has been fitted."""
        return (width // self.square) * (height // self.square)

    def squares(self, tokens: NDArray[np.integer[Any]], sizes: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
        """Which tokens of one sequence are its images': [L]. Image tokens behind these a model has written, and they are text.

        tokens: [L]. sizes: width and height of its fitted images. Raises ValueError where there are fewer tokens.
        """
        is_image = np.asarray(tokens) == self.image_token
        wanted = sum(self.num_tokens(*size) for size in sizes)
        if is_image.sum() < wanted:
            raise ValueError(f"{is_image.sum()} image tokens are there, and the images have {wanted}")
        found: NDArray[np.bool_] = is_image & (np.cumsum(is_image) <= wanted)
        return found

    def turned_by(self, count: int) -> list[int]:
        """By which axis each of a head's frequencies turns: 0 is time, 1 the row, 2 the column. count: of its frequencies."""
        if not self.interleaved:
            return [axis for axis, share in enumerate(self.axes) for _ in range(share)]
        found = [0] * count
        for axis in (1, 2):
            for frequency in range(axis, min(3 * self.axes[axis], count), 3):
                found[frequency] = axis
        return found

    def positions(self, tokens: NDArray[np.integer[Any]], sizes: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
        """Of one sequence, each token's place in time, row and column: [3, L].

        tokens: [L]. sizes: width and height of its fitted images, in their order. A text's token is one further than all before
        it on every axis; an image's squares have the place behind that on the first axis, and count rows and columns from there.
        Raises ValueError where tokens and sizes do not agree.
        """
        found = np.empty((3, len(tokens)), np.int64)
        left, place, token = list(sizes), 0, 0
        is_image = self.squares(tokens, sizes)
        while token < len(tokens):
            if not is_image[token]:
                behind = int(np.argmax(is_image[token:])) or len(tokens) - token
                found[:, token : token + behind] = np.arange(place, place + behind)
                place, token = place + behind, token + behind
                continue
            width, height = left.pop(0)
            columns, rows = width // self.square, height // self.square
            end = token + columns * rows
            if end > len(tokens) or not is_image[token:end].all():
                raise ValueError(f"an image of {width} x {height} has {columns * rows} tokens, and fewer are there")
            squares = np.arange(columns * rows)
            found[:, token:end] = place + np.stack([np.zeros_like(squares), squares // columns, squares % columns])
            place, token = place + max(columns, rows), end
        return found


def png_size(data: bytes) -> tuple[int, int]:
    """Width and height of a PNG, by its header. Raises ValueError for what is none."""
    if not data.startswith(PNG_BEGIN) or len(data) < _HEIGHT.stop:
        raise ValueError("this is no PNG")
    return int.from_bytes(data[_WIDTH]), int.from_bytes(data[_HEIGHT])


def parse_vision(raw: Mapping[str, Any], path: Path, processor: Mapping[str, Any]) -> Vision:
    """Of a multimodal config.json's content, and that of preprocessor_config.json. Raises UserError."""
    fields = Fields(raw, path)
    tower, text = fields.part("vision_config"), fields.part("text_config")
    rope_of = text if text.raw else fields  # older folders have the text's keys in the whole
    rope = rope_of.part(rope_of.first(("rope_parameters", "rope_scaling")))
    axes = rope.counts("mrope_section")
    if len(axes) != 3:
        rope.refuse("mrope_section", axes, "three counts of frequencies are wanted")
    said = Fields(processor, path.with_name(PREPROCESSOR))
    size = said.part("size")
    merge = tower.count("spatial_merge_size", 2)
    if processor:
        _check_cut(said, tower, merge)
    return Vision(
        image_token=fields.count("image_token_id", least=0),
        start_token=fields.count("vision_start_token_id", least=0),
        end_token=fields.count("vision_end_token_id", least=0),
        square=patch_size(tower) * merge,
        least_pixels=said.count("min_pixels", size.count("shortest_edge", _LEAST_PIXELS)),
        most_pixels=said.count("max_pixels", size.count("longest_edge", _MOST_PIXELS)),
        axes=(axes[0], axes[1], axes[2]),
        interleaved=rope.flag("mrope_interleaved", False),
        deepstack=len(tower.counts("deepstack_visual_indexes")),
        tower_elements=tower_elements(tower),
        tower_width=tower_width(tower),
        tower_heads=tower.count("num_heads", 16),  # transformers' default
        shape=tower_shape(tower),
        video_token=fields.count("video_token_id", least=0) if "video_token_id" in fields.raw else None,
    )


def _check_cut(said: Fields, tower: Fields, merge: int) -> None:
    """Whether images are cut as the tower takes them: in another order it would see another image. Raises UserError."""
    temporal = tower.count("temporal_patch_size", 2)
    # The defaults of transformers' Qwen2VLImageProcessor.
    for key, default, wanted in (
        ("patch_size", 14, patch_size(tower)),
        ("merge_size", 2, merge),
        ("temporal_patch_size", 2, temporal),
    ):
        if (value := said.count(key, default)) != wanted:
            said.refuse(key, value, f"{wanted}, as the vision_config of config.json has it, is wanted")


def load_vision(folder: Path) -> Vision:
    """Of a multimodal HF folder. Raises UserError."""
    path = folder / "config.json"
    raw = read_object(path, "Export the model again.")
    if (processor := read_processor(folder)) is None:
        raise UserError(
            f"{folder} has no {PREPROCESSOR}, which says at which size images come to the model. Copy it there."
        )
    return parse_vision(raw, path, processor)


def read_processor(folder: Path) -> Mapping[str, Any] | None:
    """What the folder says of how images come to the model; None where it says nothing. Raises UserError.

    Where it is in two files transformers goes by the newer one, in which it is a part of the whole processor.
    """
    for name, part in ((PROCESSOR, IMAGE_PROCESSOR), (PREPROCESSOR, None)):
        if (folder / name).is_file():
            said = read_object(folder / name, "Copy it again from where the model was published.")
            found = said if part is None else said.get(part)
            if isinstance(found, Mapping):
                return found
    return None
