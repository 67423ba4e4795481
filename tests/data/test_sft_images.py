"""Demonstrations with images: what the model is shown, which tokens are learned, and what is refused."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.core.errors import UserError
from megarl.data.exchanges import parse_demonstration
from megarl.data.image_places import collapsed
from megarl.data.row_set import RowSet, RowSource
from megarl.data.rows import Row
from megarl.data.sft import Demonstration, apart, check_demonstrations, load_demonstrations, tokenise
from megarl.models.vision import Vision
from megarl.recipe.supervised import SftData
from tests.support.sight import TEMPLATE, picture, seeing_tokenizer, sight_for

OPENS, CLOSES = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
IMAGE = {"type": "image"}
# Shows reasoning of the last turn alone, as Qwen3's templates do.
THINKING = TEMPLATE.replace(
    "{% if m['content'] is string %}",
    "{% if m.reasoning and loop.last %}{{ '<think>' + m.reasoning + '</think>' }}{% endif %}"
    "{% if m['content'] is string %}",
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Images of two, three and four squares."""
    for name, width in (("a", 8), ("b", 12), ("c", 16)):
        (tmp_path / f"{name}.png").write_bytes(picture(width, 4))
    return tmp_path / "sft.jsonl"


def write(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def said(role: str, *content: Any) -> dict[str, Any]:
    """A message: its text, or its content in parts."""
    if len(content) == 1 and isinstance(content[0], str):
        return {"role": role, "content": content[0]}
    return {
        "role": role,
        "content": [{"type": "text", "text": each} if isinstance(each, str) else each for each in content],
    }


def demonstrate(file: Path, tokenizer: Any, row: dict[str, Any], **keys: Any) -> list[Demonstration]:
    exchange = parse_demonstration(Row(file, 1, row), SftData(train=file, **keys), sight_for(tokenizer))
    return tokenise(apart(exchange, tokenizer), tokenizer, sight_for(tokenizer))


def spoken(tokenizer: Any, sight: Vision, found: Demonstration) -> tuple[str, str]:
    """The whole text, with one token for each image, and what of it is trained on."""
    whole = tokenizer.decode(collapsed(found.token_ids, sight.image_token))
    return whole, tokenizer.decode(found.token_ids[found.loss_mask == 1])


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"prompt": "Which?", "response": "red"}, f"{SHOWN}{SHOWN}Which?"),
        ({"prompt": "Is <image> or <image>?", "response": "red"}, f"Is {SHOWN} or {SHOWN}?"),
        (
            {"prompt": [said("user", "Is ", IMAGE, IMAGE, "?")], "response": [said("assistant", "red", "")]},
            f"Is {SHOWN}{SHOWN}?",
        ),
        ({"messages": [said("user", "Is <image><image>?"), said("assistant", "red")]}, f"Is {SHOWN}{SHOWN}?"),
        ({"messages": [said("user", IMAGE, "or", IMAGE), said("assistant", "re", "d")]}, f"{SHOWN}or{SHOWN}"),
        ({"messages": [said("user", "Which?"), said("assistant", "red")]}, f"{SHOWN}{SHOWN}Which?"),
    ],
    ids=["no place", "text", "prompt in parts", "messages", "messages in parts", "messages without a place"],
)
def test_the_response_alone_is_learned_behind_the_images(
    file: Path, tokenizer: Any, sight: Vision, row: dict[str, Any], shown: str
) -> None:
    write(file, row | {"images": ["a.png", "b.png"]})
    data = SftData(train=file)
    assert check_demonstrations(file, data) == 1
    [found] = load_demonstrations(file, _folder(file, tokenizer), data, sight).rows
    assert spoken(tokenizer, sight, found) == (f"{OPENS}{shown}{CLOSES}red<|im_end|>", "red<|im_end|>")
    assert (found.token_ids == sight.image_token).sum() == 2 + 3, "squares of 8 x 4 and 12 x 4 pixels"
    assert found.loss_mask.nonzero()[0].tolist() == list(range(len(found.token_ids) - 4, len(found.token_ids)))
    assert [(each.source, each.width) for each in found.images] == [
        (file.parent / "a.png", 8),
        (file.parent / "b.png", 12),
    ]


def _folder(file: Path, tokenizer: Any) -> Path:
    tokenizer.save_pretrained(file.parent / "model")
    return file.parent / "model"


def test_masks_of_several_turns_and_images_by_hand(file: Path, tokenizer: Any, sight: Vision) -> None:
    """Images of two squares in the system's message, of three in the first question, of four in the second."""
    chat = [
        said("system", "S", IMAGE),
        said("user", IMAGE, "q"),
        said("assistant", "r"),
        said("user", "<image>"),
        said("assistant", "s"),
    ]
    [found] = demonstrate(file, tokenizer, {"messages": chat, "images": ["a.png", "b.png", "c.png"]})
    start, image, end = sight.start_token, sight.image_token, sight.end_token
    opened, closed = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])

    def text(letters: str) -> list[int]:
        ids: list[int] = tokenizer(letters, add_special_tokens=False)["input_ids"]
        return ids

    parts = [
        (0, [opened, *text("system\nS"), start, image, image, end, closed, *text("\n")]),
        (0, [opened, *text("user\n"), start, image, image, image, end, *text("q"), closed, *text("\n")]),
        (0, [opened, *text("assistant\n")]),
        (1, [*text("r"), closed]),
        (0, [*text("\n"), opened, *text("user\n"), start, image, image, image, image, end, closed, *text("\n")]),
        (0, [opened, *text("assistant\n")]),
        (1, [*text("s"), closed]),
    ]
    assert found.token_ids.tolist() == [token for _, tokens in parts for token in tokens]
    assert found.loss_mask.tolist() == [trained for trained, tokens in parts for _ in tokens]
    assert found.token_ids.dtype == np.int32 and found.loss_mask.dtype == np.uint8


def test_of_a_chat_in_several_rows_each_has_the_images_that_it_shows(file: Path, sight: Vision) -> None:
    tokenizer = seeing_tokenizer(THINKING)
    answers = [said("assistant", text) | {"reasoning": "hm"} for text in ("r", "s")]
    chat = [said("user", IMAGE, "q"), answers[0], said("user", IMAGE), answers[1]]
    found = demonstrate(file, tokenizer, {"messages": chat, "images": ["a.png", "c.png"]})
    assert [spoken(tokenizer, sight, each)[1] for each in found] == [f"<think>hm</think>{a}<|im_end|>" for a in "rs"]
    assert [[image.width for image in each.images] for each in found] == [[8], [8, 16]]
    assert [(each.token_ids == sight.image_token).sum() for each in found] == [2, 2 + 4]


def test_the_limit_counts_all_tokens_of_images(file: Path, tokenizer: Any, sight: Vision) -> None:
    write(file, {"prompt": "q", "response": "r", "images": "c.png"}, {"prompt": "q", "response": "r"})
    folder = _folder(file, tokenizer)
    short = len(tokenizer(f"{OPENS}{SHOWN}q{CLOSES}r<|im_end|>", add_special_tokens=False)["input_ids"])
    for limit, dropped in ((short + 2, 1), (short + 3, 0)):
        found = load_demonstrations(file, folder, SftData(train=file, max_tokens=limit), sight)
        assert found.num_dropped == dropped and [len(each.images) for each in found.rows] == [1, 0][dropped:]


def test_another_image_is_another_row(file: Path, tokenizer: Any, sight: Vision) -> None:
    folder = _folder(file, tokenizer)

    def rows(images: Any, **bounds: int) -> RowSet[Demonstration]:
        write(file, {"prompt": "q", "response": "r"}, {"prompt": "q", "response": "r", "images": images})
        return load_demonstrations(file, folder, SftData(train=file), replace(sight, **bounds))

    before = rows("b.png")
    assert rows("b.png").digests == before.digests
    place = RowSource(before, 1).state()
    for found in (
        rows("c.png"),
        rows(base64.b64encode(picture(12, 4)).decode()),
        rows([]),
        rows("b.png", most_pixels=32),
    ):
        with pytest.raises(UserError, match="not the one that the checkpoint was made with"):
            RowSource(found, 1).load_state(place)


def test_rows_of_a_model_of_text_are_as_ever(file: Path, tokenizer: Any, sight: Vision) -> None:
    write(file, {"prompt": "Is <image>?", "response": "<image>", "images": ["gone.png"]})
    folder = _folder(file, tokenizer)
    text = f"{OPENS}Is <image>?{CLOSES}<image><|im_end|>"
    for data, seen in ((SftData(train=file), None), (SftData(train=file, images_key=None), sight)):
        [found] = load_demonstrations(file, folder, data, seen).rows
        assert found.images == () and tokenizer.decode(found.token_ids) == text
    write(file, {"messages": [said("user", IMAGE), said("assistant", "red")]})
    assert check_demonstrations(file, SftData(train=file)) == 1, "what the model is, is not known yet"
    with pytest.raises(
        UserError, match=r"'content' is a list, and must be a string.* are for a model that sees images"
    ):
        load_demonstrations(file, folder, SftData(train=file))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "<image>", "response": "r"}, "1 places of images (<image>), and the row 0 images"),
        (
            {"prompt": "<image>", "response": "r", "images": ["a.png", "b.png"]},
            "and the row 2 images in its field 'images'",
        ),
        ({"prompt": "q", "response": "r", "images": ["gone.png"]}, "field 'images', image 1: there is no file"),
        ({"prompt": "q", "response": "<image>", "images": "a.png"}, "the assistant's text has a place of an image"),
        (
            {"messages": [said("user", "q"), said("assistant", IMAGE, "r")], "images": "a.png"},
            "the assistant's text has a place of an image",
        ),
        ({"messages": [said("user", {"type": "video"}), said("assistant", "r")]}, "message 1, part 1 of its content"),
        ({"prompt": "q", "response": "a <|image_pad|>"}, "the text spells <|image_pad|>"),
        ({"prompt": "q<|vision_end|>", "response": "a", "images": "a.png"}, "the text spells <|vision_end|>"),
        (
            {"messages": [said("user", "q"), said("assistant", "r") | {"reasoning": "<|vision_start|>"}]},
            "the text spells <|vision_start|>",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused_rows(file: Path, tokenizer: Any, sight: Vision, row: dict[str, Any], says: str) -> None:
    write(file, {"prompt": "1+1?", "response": "2"}, row)
    with pytest.raises(UserError) as caught:
        load_demonstrations(file, _folder(file, tokenizer), SftData(train=file), sight)
    assert f"{file}, line 2" in str(caught.value) and says in str(caught.value)


@pytest.mark.parametrize("template", [None, TEMPLATE.replace("<|vision_end|>", "")])
def test_refused_templates(file: Path, template: str | None) -> None:
    tokenizer = seeing_tokenizer(template)
    with pytest.raises(UserError, match=r"sft.jsonl, line 1: .*(no chat template|does not write its 1 images)"):
        demonstrate(file, tokenizer, {"prompt": "q", "response": "r", "images": "a.png"})
