"""Where images stand, in messages and in token ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.errors import UserError
from megarl.core.types import Image
from megarl.data.image_places import as_text, collapsed, expanded, in_parts, placed
from megarl.data.rows import Row
from megarl.models.vision import Vision

SIGHT = Vision(3, 1, 2, square=4, least_pixels=16, most_pixels=4096, axes=(2, 3, 3))
ROW = Row(Path("train.jsonl"), 4, {})
TEXT = st.lists(st.integers(4, 9), max_size=4)


@given(TEXT, st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), TEXT), max_size=4))
def test_what_is_expanded_collapses_to_what_it_was(before: list[int], shown: list[tuple[int, int, list[int]]]) -> None:
    ids, whole = list(before), list(before)
    for columns, rows, text in shown:
        ids += [1, 3, 2, *text]
        whole += [1, *[3] * (columns * rows), 2, *text]
    images = [Image(b"", 4 * columns, 4 * rows) for columns, rows, _ in shown]
    found = expanded(np.array(ids, np.int32), images, SIGHT, ROW)
    assert found.tolist() == whole and found.dtype == np.int32
    again = collapsed(found, SIGHT.image_token)
    assert again.tolist() == ids and again.dtype == np.int32
    # The model's own places agree that these are the images.
    assert SIGHT.positions(found, [(each.width, each.height) for each in images]).shape == (3, len(whole))


@pytest.mark.parametrize(
    "ids", [[], [1, 2], [1, 3, 2, 1, 3, 2], [3, 2], [1, 3], [3], [1, 3, 3, 2], [4, 3, 2], [1, 3, 4]]
)
def test_a_template_that_writes_images_otherwise_is_refused(ids: list[int]) -> None:
    with pytest.raises(UserError, match=r"train.jsonl, line 4: the model's chat template does not write its 1 images"):
        expanded(np.array(ids, np.int32), [Image(b"", 4, 4)], SIGHT, ROW)


def test_content_in_parts_is_text_with_places_and_back() -> None:
    parts = [
        {"role": "system", "content": "Look."},
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": "One"}, {"type": "image", "text": None}],
        },
        {"role": "user", "content": [{"type": "text", "text": "Two"}]},
    ]
    messages = as_text(parts, "here")
    assert messages == [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": "<image>One<image>"},
        {"role": "user", "content": "Two"},
    ]
    assert in_parts(messages) == [
        parts[0],
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "One"}, {"type": "image"}]},
        {"role": "user", "content": "Two"},
    ]
    for other in ("text", None, 3, [], ["a"], [{"role": "user"}], [{"role": "user", "content": []}]):
        assert as_text(other, "here") == other, "which is refused elsewhere"


@pytest.mark.parametrize("own", ["image", "path", "url", "image_url"])
def test_an_image_within_a_part_is_refused_and_not_passed_over(own: str) -> None:
    part = {"type": "image", "text": None, "index": 0}
    assert as_text([{"role": "user", "content": [part | {own: None}]}], "here")
    with pytest.raises(
        UserError, match=f"here, message 1, part 1 of its content: it has its image in '{own}'. .*images_key"
    ):
        as_text([{"role": "user", "content": [part | {own: "a.png"}]}], "here")


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "video"}, "of type 'video'"),
        ({"text": "a"}, "of type None"),
        ({"type": "text", "text": None}, "of type 'text'"),
        ("a", "a string"),
    ],
)
def test_parts_of_other_kinds_are_refused(part: object, says: str) -> None:
    with pytest.raises(UserError, match=f"here, message 2, part 2 of its content: it is {says}; wanted are parts"):
        as_text([{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "image"}, part]}], "here")


def test_images_without_a_place_stand_before_the_users_first_text() -> None:
    assert placed("What?", 2, ROW, "images") == "<image><image>What?"
    assert placed("What <image> is <image>?", 2, ROW, "images") == "What <image> is <image>?"
    assert placed("What?", 0, ROW, "images") == "What?"
    said = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    assert [each["content"] for each in placed(said, 1, ROW, "images")] == [
        "system",
        "<image>user",
        "assistant",
        "user",
    ]
    assert placed([{"role": "tool", "content": "a"}], 1, ROW, "images") == [{"role": "tool", "content": "<image>a"}]


@pytest.mark.parametrize(("text", "count"), [("<image>", 0), ("<image>", 2), ("<image><image>", 1)])
def test_as_many_places_as_images_are_wanted(text: str, count: int) -> None:
    says = rf"line 4: the prompt has {text.count('<')} places of images \(<image>\), and the row {count} images"
    for prompt in (text, [{"role": "system", "content": text}, {"role": "user", "content": ""}]):
        with pytest.raises(UserError, match=says):
            placed(prompt, count, ROW, "images")
