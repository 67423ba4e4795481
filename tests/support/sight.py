"""How a model sees images, rows with some, and a tokenizer and template for them: without any model."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pillow

from megarl.core.types import Image, Prompt
from megarl.models.vision import Vision
from tests.data.conftest import make_tokenizer

# Of Qwen's templates: a part that is an image becomes three tokens.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")


def seeing_tokenizer(template: str | None = TEMPLATE) -> Any:
    """One token a byte, and the tokens of images."""
    tokenizer = make_tokenizer(chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<s>", "<|im_start|>", *MARKS]})
    return tokenizer


def sight_for(tokenizer: Any, **changed: Any) -> Vision:
    """Squares of 4 x 4 pixels, from 1 to 12 of them an image."""
    start, image, end = tokenizer.convert_tokens_to_ids(list(MARKS))
    settings = {"square": 4, "least_pixels": 16, "most_pixels": 12 * 16, "axes": (2, 3, 3)}
    return Vision(image_token=image, start_token=start, end_token=end, **{**settings, **changed})


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB", kind: str = "PNG", **saving: Any) -> bytes:
    """A file of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    written = io.BytesIO()
    Pillow.fromarray(pixels, "RGBA").convert(mode).save(written, kind, **saving)
    return written.getvalue()


def pixels_of(data: bytes) -> np.ndarray:
    """[height, width, 3]."""
    with Pillow.open(io.BytesIO(data)) as opened:
        assert opened.mode == "RGB"
        return np.asarray(opened)


def seeing_prompt(name: str, image: Image | Path | bytes, image_token: int = 7) -> Prompt:
    """A prompt with one image of two tokens between 5 and 6, whose first token tells prompts apart."""
    image = image if isinstance(image, Image) else Image(image, 8, 4)
    ids = np.array([10 + int(name[1:]), 5, image_token, image_token, 6, 9], np.int32)
    return Prompt(name, ids, f"text of {name}", "42", images=(image,))
