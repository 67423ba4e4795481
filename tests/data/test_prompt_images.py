"""Rows with images as prompts: what the model is asked with, what graders are told, and what is refused."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megarl.core.errors import UserError
from megarl.data.image_places import collapsed
from megarl.data.prompts import check_rows, digests_of, load_prompts
from megarl.models.vision import Vision
from megarl.recipe.schema import Data
from tests.support.sight import TEMPLATE, picture, seeing_tokenizer, sight_for

OPENS, CLOSES = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    for name, width in (("a", 8), ("b", 12)):
        (tmp_path / f"{name}.png").write_bytes(picture(width, 4))
    return tmp_path / "train.jsonl"


def write(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps({"answer": "2", **row}) + "\n" for row in rows))
    return file


def parts(*kinds: str) -> list[dict[str, str]]:
    return [{"type": "image"} if kind == "image" else {"type": "text", "text": kind} for kind in kinds]


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ("Which?", f"{SHOWN}{SHOWN}Which?"),
        ("Is <image> or <image>?", f"Is {SHOWN} or {SHOWN}?"),
        ([{"role": "user", "content": parts("Is ", "image", "image", "?")}], f"Is {SHOWN}{SHOWN}?"),
        ([{"role": "user", "content": "Is <image><image>?"}], f"Is {SHOWN}{SHOWN}?"),
    ],
    ids=["no place", "text", "parts", "messages"],
)
def test_images_stand_where_the_prompt_says(file: Path, tokenizer: Any, sight: Vision, prompt: Any, shown: str) -> None:
    write(file, {"prompt": prompt, "images": ["a.png", "b.png"], "level": 3})
    data = Data(train=file)
    assert check_rows(file, data) == 1
    (found,) = load_prompts(file, tokenizer, data, sight=sight).prompts
    assert found.text == f"{OPENS}{shown}{CLOSES}"
    short = collapsed(found.token_ids, sight.image_token)
    assert tokenizer.decode(short) == found.text
    assert short.tolist() == tokenizer(found.text, add_special_tokens=False)["input_ids"]
    assert (found.token_ids == sight.image_token).sum() == 2 + 3, "squares of 8 x 4 and 12 x 4 pixels"
    assert [(each.width, each.height) for each in found.images] == [(8, 4), (12, 4)]
    assert [each.source for each in found.images] == [file.parent / "a.png", file.parent / "b.png"]
    # Graders are told where images lie and stand.
    said = shown.replace(SHOWN, "<image>")
    assert found.metadata == {
        "level": 3,
        "images": [str(file.parent / f"{name}.png") for name in "ab"],
        "prompt_messages": [{"role": "user", "content": said}],
    }


def test_what_the_recipe_says_around_a_prompt_stands_around_its_images(
    file: Path, tokenizer: Any, sight: Vision
) -> None:
    write(file, {"prompt": "Which?", "images": "a.png"}, {"prompt": "Of <image>?", "images": "a.png"})
    data = Data(train=file, prompt_template="Look: {prompt}", prompt_suffix=" Now.", system_prompt="Be short.")
    first, second = (each.text for each in load_prompts(file, tokenizer, data, sight=sight).prompts)
    system = "<|im_start|>system\nBe short.<|im_end|>\n"
    assert first == f"{system}{OPENS}{SHOWN}Look: Which? Now.{CLOSES}"
    assert second == f"{system}{OPENS}Look: Of {SHOWN}? Now.{CLOSES}"


def test_graders_are_given_no_bytes(tmp_path: Path, tokenizer: Any, sight: Vision) -> None:
    image = picture(8, 4)
    rows = [{"prompt": "Which?", "answer": "2", "extra": {"images": [{"bytes": image, "path": None}], "level": 1}}]
    file = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    (found,) = load_prompts(file, tokenizer, Data(train=file, images_key="extra.images"), sight=sight).prompts
    assert found.images[0].source == image
    assert found.metadata["extra"] == {"level": 1} and "extra.images" not in found.metadata
    write(file.with_suffix(".jsonl"), {"prompt": "Which?", "images": base64.b64encode(image).decode(), "level": 2})
    (found,) = load_prompts(file.with_suffix(".jsonl"), tokenizer, Data(train=file), sight=sight).prompts
    assert found.images[0].source == image and set(found.metadata) == {"level", "prompt_messages"}


def test_the_limit_of_a_prompt_counts_all_tokens_of_its_images(file: Path, tokenizer: Any, sight: Vision) -> None:
    write(file, {"prompt": "Which?", "images": "b.png"}, {"prompt": "Which?"})
    longest = len(tokenizer(f"{OPENS}{SHOWN}Which?{CLOSES}", add_special_tokens=False)["input_ids"])
    data = Data(train=file, max_prompt_tokens=longest)
    assert load_prompts(file, tokenizer, data, sight=sight).num_dropped == 1
    data = Data(train=file, max_prompt_tokens=longest + 2)
    found = load_prompts(file, tokenizer, data, sight=sight)
    assert found.num_dropped == 0 and [len(each.images) for each in found.prompts] == [1, 0]


def test_another_image_is_another_row(file: Path, tokenizer: Any, sight: Vision) -> None:
    def digests(**keys: Any) -> dict[str, str]:
        bounds = {"most_pixels": 32} if keys.pop("small", False) else {}
        found = load_prompts(file, tokenizer, Data(train=file), sight=replace(sight, **bounds)).prompts
        return digests_of(found, Data(train=file))

    write(file, {"prompt": "Which?", "images": "a.png"})
    before = digests()
    assert digests() == before
    (file.parent / "c.png").write_bytes(picture(8, 4, 1))
    for images in (["c.png"], base64.b64encode(picture(8, 4)).decode(), []):
        write(file, {"prompt": "Which?", "images": images})
        after = digests()
        assert after["prompts"] != before["prompts"] and after["answers"] == before["answers"]
    write(file, {"prompt": "Which?", "images": "b.png"})
    assert digests() != digests(small=True)


def test_rows_of_a_model_of_text_are_as_ever(file: Path, tokenizer: Any) -> None:
    write(file, {"prompt": "Is <image>?", "images": ["gone.png"]})
    (found,) = load_prompts(file, tokenizer, Data(train=file)).prompts
    assert found.text == f"{OPENS}Is <image>?{CLOSES}" and found.images == ()
    assert found.metadata["images"] == ["gone.png"]
    write(file, {"prompt": [{"role": "user", "content": parts("image", "What?")}]})
    assert check_rows(file, Data(train=file)) == 1, "what the model is, is not known yet"
    with pytest.raises(UserError, match=r"'content' is a list, and must be a string.*for a model that sees images"):
        load_prompts(file, tokenizer, Data(train=file))


def test_without_a_key_of_images_the_field_is_one_like_others(file: Path, tokenizer: Any, sight: Vision) -> None:
    data = Data(train=file, images_key=None)
    write(file, {"prompt": "Is <image>?", "images": ["gone.png"]})
    (found,) = load_prompts(file, tokenizer, data, sight=sight).prompts
    assert found.text == f"{OPENS}Is <image>?{CLOSES}" and found.metadata["images"] == ["gone.png"]
    write(file, {"prompt": [{"role": "user", "content": parts("image", "What?")}]})
    with pytest.raises(UserError, match=r"and data.images_key set"):
        load_prompts(file, tokenizer, data, sight=sight)
    write(file, {"prompt": "Is <|image_pad|> one?"})
    with pytest.raises(UserError, match=r"line 1: the text spells <\|image_pad\|>"):
        load_prompts(file, tokenizer, data, sight=sight)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "Is <image>?"}, "1 places of images (<image>), and the row 0 images in its field 'images'"),
        ({"prompt": "Is <image>?", "images": ["a.png", "a.png"]}, "1 places of images (<image>), and the row 2 images"),
        ({"prompt": "Is it?", "images": ["a.png", "c.png"]}, "field 'images', image 2: there is no file"),
        ({"prompt": f"{SHOWN} it?", "images": "a.png"}, "spells <|image_pad|>"),
        ({"prompt": "<|vision_end|>", "images": "a.png"}, "spells <|vision_end|>"),
        ({"prompt": [{"role": "user", "content": "<|vision_start|>"}]}, "spells <|vision_start|>"),
        ({"prompt": [{"role": "user", "content": parts("a", "image")}]}, "and the row 0 images"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video"}]}], "images": "a.png"},
            "field 'prompt', message 1, part 1 of its content: it is of type 'video'",
        ),
        ({"prompt": [{"role": "user", "content": parts(" ")}]}, "all messages are empty"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused_rows(file: Path, tokenizer: Any, sight: Vision, row: dict[str, Any], says: str) -> None:
    write(file, {"prompt": "1+1?"}, row)
    with pytest.raises(UserError) as caught:
        load_prompts(file, tokenizer, Data(train=file), sight=sight)
    assert f"{file}, line 2" in str(caught.value) and says in str(caught.value)


def test_text_that_spells_the_token_of_videos_is_refused(file: Path, tokenizer: Any, sight: Vision) -> None:
    """A server would look for the video, and fail."""
    write(file, {"prompt": "a <s>", "images": "a.png"})
    assert load_prompts(file, tokenizer, Data(train=file), sight=sight)
    with pytest.raises(UserError, match="line 1: the text spells <s>, which the model takes for a place of"):
        video = tokenizer.convert_tokens_to_ids("<s>")
        load_prompts(file, tokenizer, Data(train=file), sight=replace(sight, video_token=video))


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "no chat template"),
        (TEMPLATE.replace("<|image_pad|>", ""), "does not write its 1 images as start, image and end token"),
        (TEMPLATE.replace("<|vision_end|>", ""), "does not write its 1 images as start, image and end token"),
        (TEMPLATE.replace("{{ part['text'] }}", ""), "leaves out its content"),
        (TEMPLATE.replace("m['content'] is string", "true"), "Place images in messages of the user"),
    ],
)
def test_refused_templates(file: Path, template: str | None, says: str) -> None:
    """A row without images before, whose content is shown, says nothing of one with images."""
    tokenizer = seeing_tokenizer(template)
    rows = [{"prompt": "1+1?"}] if template else []
    write(file, *rows, {"prompt": "Which?", "images": "a.png"})
    with pytest.raises(UserError) as caught:
        load_prompts(file, tokenizer, Data(train=file), sight=sight_for(tokenizer))
    assert f"{file}, line {len(rows) + 1}" in str(caught.value) and says in str(caught.value)
