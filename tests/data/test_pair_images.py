"""Pairs and labelled answers with images: what their prompt shows, what pairs share, and what is refused."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.core.errors import UserError
from megarl.core.types import Block
from megarl.data.image_places import collapsed
from megarl.data.pack import assemble
from megarl.data.pack_rows import pack_pairs
from megarl.data.pairs import Pair, check_pairs, load_pairs
from megarl.data.row_set import RowSet
from megarl.data.unpaired import Unpaired, check_unpaired, load_unpaired, mismatched
from megarl.models.vision import Vision
from megarl.recipe.supervised import PairData, UnpairedData
from tests.support.sight import picture

OPENS, CLOSES = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"


def part(text: str | None = None) -> dict[str, Any]:
    """As TRL's published sets write parts: an image has the key of texts, without one."""
    return {"text": text, "type": "image" if text is None else "text"}


def said(role: str, *content: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content[0] if isinstance(content[0], str) else list(content)}]


TRL = {
    "prompt": said("user", part(), part("Which? "), part()),
    "chosen": said("assistant", part("red")),
    "rejected": said("assistant", part("blue")),
    "images": ["a.png", "b.png"],
}


@pytest.fixture
def file(tmp_path: Path, tokenizer: Any) -> Path:
    """Beside images of two and three squares, and the model's folder."""
    for name, width in (("a", 8), ("b", 12)):
        (tmp_path / f"{name}.png").write_bytes(picture(width, 4))
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "pairs.jsonl"


def load(file: Path, sight: Vision | None, *rows: dict[str, Any], **keys: Any) -> RowSet[Pair]:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_pairs(file, file.parent / "model", PairData(train=file, **keys), sight)


@pytest.mark.parametrize(
    "row",
    [
        TRL,
        TRL | {"prompt": "<image>Which? <image>", "chosen": "red", "rejected": "blue"},
        {side: [*TRL["prompt"], *TRL[side]] for side in ("chosen", "rejected")}
        | {"prompt": "not read", "images": TRL["images"]},
    ],
    ids=["TRL's", "texts", "whole chats"],
)
def test_both_answers_stand_behind_the_same_images(
    file: Path, tokenizer: Any, sight: Vision, row: dict[str, Any]
) -> None:
    [pair] = load(file, sight, row).rows
    assert check_pairs(file, PairData(train=file)) == 1
    for side, answer in ((pair.chosen, "red"), (pair.rejected, "blue")):
        whole = tokenizer.decode(collapsed(side.token_ids, sight.image_token))
        assert whole == f"{OPENS}{SHOWN}Which? {SHOWN}{CLOSES}{answer}<|im_end|>"
        assert tokenizer.decode(side.token_ids[side.loss_mask == 1]) == f"{answer}<|im_end|>"
        assert (side.token_ids == sight.image_token).sum() == 2 + 3, "squares of 8 x 4 and 12 x 4 pixels"
        assert [(image.source, image.width) for image in side.images] == [
            (file.parent / "a.png", 8),
            (file.parent / "b.png", 12),
        ]


def test_without_a_place_images_stand_before_the_text(file: Path, tokenizer: Any, sight: Vision) -> None:
    [pair] = load(file, sight, {"prompt": "q", "chosen": "r", "rejected": "s", "images": "a.png"}).rows
    for side in (pair.chosen, pair.rejected):
        assert f"{OPENS}{SHOWN}q" in tokenizer.decode(collapsed(side.token_ids, sight.image_token))


def test_what_answers_share_goes_once_and_no_pixels_of_it(file: Path, sight: Vision) -> None:
    """Bytes of the row, in memory, on their way, and where they arrive; of a file its name."""
    large = picture(800, 800)
    (file.parent / "large.png").write_bytes(large)
    text = {"prompt": "q", "chosen": "r", "rejected": "s"}
    seeing = Vision(sight.image_token, sight.start_token, sight.end_token, 40, 1600, 640_000, (2, 3, 3))
    inside = base64.b64encode(large).decode()
    for given, size in ((inside, len(large)), ("large.png", 0)):
        pairs = load(file, seeing, text | {"images": given}, text).rows
        [(plan, block)] = pack_pairs(pairs, num_shards=1, micro_batch_tokens=1024, scored=False)
        back: Block = pickle.loads(data := pickle.dumps(block, protocol=5))
        assert size <= len(data) < size + 20_000
        [micro] = assemble(plan, [back]).mini_batches[0].micro_batches
        shown = [its for its in micro.images or () if its]
        assert len(shown) == 2 and shown[0] == shown[1] == pairs[0].chosen.images
        lengths = np.diff(micro.cu_seqlens).tolist()
        assert [bool(its) for its in micro.images or ()] == [length > 100 for length in lengths]


def test_the_limit_counts_images_and_another_image_is_another_pair(file: Path, sight: Vision) -> None:
    text = {"prompt": "q", "chosen": "r", "rejected": "ss"}
    longest = len(load(file, sight, text | {"images": "b.png"}).rows[0].rejected.token_ids)
    assert [
        load(file, sight, text, text | {"images": "b.png"}, max_tokens=longest - less).num_dropped for less in (0, 1)
    ] == [
        0,
        1,
    ]
    digests = [load(file, sight, text | {"images": images}).digests for images in ("a.png", "b.png", [], "a.png")]
    assert digests[0] == digests[3] and digests[0] not in digests[1:3]


def test_a_model_of_text_reads_text(file: Path, tokenizer: Any, sight: Vision) -> None:
    row = {"prompt": "<image>?", "chosen": "<image>", "rejected": "s", "images": "gone.png"}
    for seen, keys in ((None, {}), (sight, {"images_key": None})):
        [pair] = load(file, seen, row, **keys).rows
        assert pair.chosen.images == () and "<image>?" in tokenizer.decode(pair.chosen.token_ids)
    with pytest.raises(UserError, match=r"'content' is a list, and must be a string.* for a model that sees images"):
        load(file, None, TRL)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"images": ["a.png"]}, "2 places of images (<image>), and the row 1 images in its field 'images'"),
        ({"images": ["a.png", "c.png"]}, "field 'images', image 2: there is no file"),
        ({"rejected": said("assistant", part(), part("blue"))}, "the assistant's text has a place of an image"),
        ({"rejected": "a <image>"}, "the assistant's text has a place of an image"),
        ({"rejected": said("assistant", part("red"))}, "are the same answer"),
        ({"rejected": "<|image_pad|>"}, "the text spells <|image_pad|>"),
        (
            {"prompt": said("user", {"type": "video"})},
            "field 'prompt', message 1, part 1 of its content: it is of type",
        ),
        (
            {
                "prompt": None,
                "chosen": [*said("user", part("q")), *TRL["chosen"]],
                "rejected": [*said("user", part()), *TRL["rejected"]],
            },
            "differ before their last",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused_rows(file: Path, sight: Vision, changed: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        load(file, sight, TRL, TRL | changed)
    assert f"{file}, line 2" in str(caught.value) and says in str(caught.value)


LABELLED = {"prompt": TRL["prompt"], "completion": TRL["chosen"], "label": True, "images": TRL["images"]}


def load_answers(file: Path, sight: Vision | None, *rows: dict[str, Any], **keys: Any) -> RowSet[Unpaired]:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_unpaired(file, file.parent / "model", UnpairedData(train=file, **keys), sight)


def test_a_labelled_answer_stands_behind_its_images(file: Path, tokenizer: Any, sight: Vision) -> None:
    chat = {"completion": [*TRL["prompt"], *TRL["chosen"]], "label": 0, "images": TRL["images"]}
    rows = load_answers(file, sight, LABELLED, LABELLED | {"prompt": "<image>Which? <image>"}, chat).rows
    assert check_unpaired(file, UnpairedData(train=file)) == 3
    for row in rows:
        whole = tokenizer.decode(collapsed(row.answer.token_ids, sight.image_token))
        assert whole == f"{OPENS}{SHOWN}Which? {SHOWN}{CLOSES}red<|im_end|>"
        assert [image.width for image in row.answer.images] == [8, 12]
    with pytest.raises(UserError, match=r"line 2: the assistant's text has a place of an image"):
        load_answers(file, sight, LABELLED, LABELLED | {"completion": "<image>"})
    with pytest.raises(UserError, match=r"'content' is a list, and must be a string.* for a model that sees images"):
        load_answers(file, None, LABELLED, LABELLED)


def test_a_mismatched_answer_stands_behind_the_images_of_its_prompt(file: Path, tokenizer: Any, sight: Vision) -> None:
    others = ({"completion": "green", "images": "a.png", "prompt": "p"}, {"completion": "b", "prompt": "q"})
    data = UnpairedData(train=file, max_tokens=40)
    rows = load_answers(file, sight, LABELLED, *({"label": False} | each for each in others), max_tokens=40).rows
    found = mismatched(rows, data.max_tokens)
    said = [tokenizer.decode(collapsed(row.answer.token_ids, sight.image_token)) for row in found]
    first = f"{OPENS}{SHOWN}Which? {SHOWN}{CLOSES}green<|im_end|>"
    assert len(rows[0].answer.token_ids) == 39 and len(found[0].answer.token_ids) == 40
    assert said == [
        first.removesuffix("<|im_end|>"),
        f"{OPENS}{SHOWN}p{CLOSES}b<|im_end|>",
        f"{OPENS}q{CLOSES}red<|im_end|>",
    ]
    assert [row.answer.images for row in found] == [row.answer.images for row in rows]
