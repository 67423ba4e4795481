"""The task of colors: what a row says is what its image shows; the model for it sees, and its tokens are its tokenizer's."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megarl.models.hf_config import load_model_config
from tools.make_colors import COLORS, NOISE, make_colors
from tools.make_tiny_vision_model import (
    ARCHITECTURES,
    IMAGE,
    PATCH,
    Kind,
    make_tiny_vision_model,
    make_vision_tokenizer,
)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("squares", [1, 3])
def test_an_image_shows_what_its_row_answers(tmp_path: Path, squares: int) -> None:
    make_colors(tmp_path, squares=squares, side=28, num_train=130, num_eval=9, num_sft=400)
    for row in [*rows(tmp_path / "train.jsonl"), *rows(tmp_path / "eval.jsonl")]:
        with Image.open(tmp_path / row["images"][0]) as image:
            assert image.size == (28 * squares, 28) and image.mode == "RGB"
            place = 0 if squares == 1 else int(row["prompt"].removesuffix("?").split()[-1]) - 1
            shown = np.array(image)[:, 28 * place : 28 * (place + 1)].reshape(-1, 3)
        assert (shown == shown[0]).all() and abs(shown[0] - np.array(COLORS[row["answer"]])).max() <= NOISE
        assert row["prompt"].startswith("<image>")
    said = Counter(row["response"] for row in rows(tmp_path / "sft.jsonl"))
    assert said.keys() == COLORS.keys() and min(said.values()) > 60


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_colors(tmp_path / name, seed=seed, num_train=2, num_eval=1, num_sft=8)
    for file in ("train.jsonl", "sft.jsonl", "images/train_00001.png"):
        one, same, other = ((tmp_path / name / file).read_bytes() for name in "abc")
        assert one == same and (one != other or file == "train.jsonl")
    with pytest.raises(ValueError, match="allowed are 1 to 9"):
        make_colors(tmp_path, squares=10)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_model_of_the_task_sees(tmp_path: Path, kind: Kind) -> None:
    make_tiny_vision_model(tmp_path, kind=kind, hidden_size=64)
    vision = load_model_config(tmp_path).vision
    tokenizer = make_vision_tokenizer()
    assert vision is not None and vision.square == 2 * PATCH[kind] and sum(vision.axes) in (8, 16)
    assert vision.deepstack == (2 if kind.startswith("qwen3_vl") else 0)
    tokens = tokenizer.convert_tokens_to_ids([*IMAGE])
    assert tokens == [vision.start_token, vision.image_token, vision.end_token]
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What color?"}]}
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    assert text == f"<|im_start|>user\n{''.join(IMAGE)}What color?<|im_end|>\n<|im_start|>assistant\n"
    assert [each for each in tokenizer.encode(text) if each in tokens] == tokens
