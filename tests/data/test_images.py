"""Images of rows: every form in which a row may give one, what is refused, and the PNG that everybody works on."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from megarl.core.errors import UserError
from megarl.core.types import Image
from megarl.data.images import identity, paths_of, png, pngs, row_images
from megarl.data.rows import Row
from megarl.models.vision import Vision, png_size
from tests.support.sight import picture, pixels_of

SIGHT = Vision(3, 1, 2, square=4, least_pixels=16, most_pixels=192, axes=(2, 3, 3))
DATA = picture(9, 6)
TEXT = base64.b64encode(DATA).decode()


def images(folder: Path, value: object, key: str = "images", **fields: object) -> tuple[Image, ...]:
    return row_images(Row(folder / "train.jsonl", 4, {"images": value, **fields}), key, SIGHT)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(DATA)
    (tmp_path / "rows").mkdir()
    return tmp_path / "rows"


@pytest.mark.parametrize(
    "given",
    [
        "../pictures/a.png",
        "{root}/pictures/a.png",
        "file://{root}/pictures/a.png",
        f"data:image/png;base64,{TEXT}",
        base64.encodebytes(DATA).decode(),
        TEXT,
        DATA,
        {"bytes": DATA, "path": "a name that is not there.png"},
        {"bytes": None, "path": "../pictures/a.png"},
        {"bytes": TEXT},
    ],
    ids=[
        "relative",
        "absolute",
        "file",
        "data URL",
        "lines of base64",
        "base64",
        "bytes",
        "HF bytes",
        "HF path",
        "HF base64",
    ],
)
def test_a_row_gives_an_image_in_many_forms_alone_or_in_a_list(folder: Path, given: Any) -> None:
    given = given.replace("{root}", str(folder.parent)) if isinstance(given, str) else given
    [alone] = images(folder, given)
    [first, second] = images(folder, [given, given])
    assert (alone.width, alone.height) == (8, 8) and alone == first == second
    assert pixels_of(png(alone, "")).shape == (8, 8, 3)
    is_file = isinstance(alone.source, Path)
    assert paths_of([alone, first]) == ([str(alone.source)] * 2 if is_file else None)
    assert alone.source == DATA or (is_file and alone.source.read_bytes() == DATA)


def test_a_row_without_the_field_has_no_images_and_a_dot_reaches_into_an_object(folder: Path) -> None:
    assert images(folder, None) == images(folder, []) == images(folder, DATA, "pictures") == ()
    [found] = images(folder, None, "extra.shown", extra={"shown": DATA})
    assert found.source == DATA
    assert paths_of([]) is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("b.png", "there is no file {root}/rows/b.png. Correct"),
        ("../pictures/aa.png", "Did you mean {root}/rows/../pictures/a.png?"),
        ("x" * 5000 + ".png", "cannot be read: File name too long"),
        ("../pictures", "cannot be read: Is a directory"),
        ("http://host/a.png", "http://host/a.png is an address. Download"),
        ("", "it is empty"),
        (b"", "it is empty"),
        (None, "it is null; wanted is a path"),
        (3, "it is a number; wanted is a path"),
        ({"url": "a"}, "it is an object; wanted is a path"),
        ({"bytes": None, "path": None}, "it is null"),
        ("data:image/png;base64,%%%", "a data URL whose content is no base64"),
        (b"GIF89a but no more", "its bytes cannot be decoded as an image. Formats are BMP"),
        (DATA[:40], "cannot be decoded as an image"),
        (picture(2, 500), "more than 200 times the shorter one. Cut the image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "Formats are BMP"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_what_is_no_image_is_refused_with_its_place(folder: Path, given: object, says: str) -> None:
    with pytest.raises(UserError) as caught:
        images(folder, [DATA, given])
    assert f"{folder}/train.jsonl, line 4, field 'images', image 2: " in str(caught.value)
    assert says.format(root=folder.parent) in str(caught.value)


def test_an_image_that_unpacks_to_too_many_pixels_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 20)
    with pytest.raises(UserError, match="image 1: its bytes unpack to more pixels than PIL takes"):
        images(folder, DATA)


def test_what_is_damaged_behind_its_header_is_told_when_it_is_played(folder: Path) -> None:
    whole = picture(64, 64)
    found = images(folder, [DATA, whole[:3000] + bytes(500) + whole[3500:]])
    with pytest.raises(UserError, match=r"train.jsonl:4, image 2: its bytes cannot be decoded as an image \("):
        pngs(found, "train.jsonl:4")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "JPEG2000"])
@pytest.mark.parametrize("lies", ["in a file", "in the row"])
def test_what_was_cut_off_is_refused_as_rows_are_read(folder: Path, kind: str, lies: str) -> None:
    """As a download that broke off, whose header may be whole; bytes behind an image's end, as phones write, are no fault."""
    whole = picture(64, 64, kind=kind)
    for data, says in ((whole[: len(whole) * 2 // 3], r"field 'images', image 1: .*decoded as an image"), (whole, "")):
        file = folder.parent / "cut.img"
        file.write_bytes(data + (b"" if says else b"more"))
        given = str(file) if lies == "in a file" else file.read_bytes()
        if says:
            with pytest.raises(UserError, match=says):
                images(folder, given)
        else:
            assert [each.width for each in images(folder, given)] == [12]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "JPEG2000"])
def test_formats(folder: Path, kind: str) -> None:
    [found] = images(folder, picture(8, 12, kind=kind))
    assert (found.width, found.height) == (8, 12)
    assert png_size(png(found, "")) == (8, 12)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "L", "P", "1", "CMYK"])
def test_pixels_are_as_transformers_has_them(folder: Path, mode: str) -> None:
    """Converted and resized by its own image processor, which has to find nothing left to do to our PNG."""
    from transformers.image_transforms import convert_to_rgb

    kind = "TIFF" if mode == "CMYK" else "PNG"
    data = picture(21, 30, mode=mode, kind=kind)
    [found] = images(folder, data)
    with PIL.Image.open(io.BytesIO(data)) as opened:
        theirs = convert_to_rgb(opened).resize((found.width, found.height), PIL.Image.Resampling.BICUBIC)
    assert (pixels_of(png(found, "")) == np.asarray(theirs)).all()


@pytest.mark.parametrize("orientation", range(9))
def test_a_photograph_is_turned_as_transformers_turns_it(folder: Path, orientation: int) -> None:
    from transformers.image_utils import load_image

    profile = PIL.Image.Exif()
    profile[0x0112] = orientation
    (folder / "photograph.png").write_bytes(picture(12, 8, exif=profile))
    [found] = images(folder, "photograph.png")
    theirs = load_image(str(folder / "photograph.png"))
    assert (found.width, found.height) == theirs.size == ((8, 12) if orientation > 4 else (12, 8))
    assert (pixels_of(png(found, "")) == np.asarray(theirs)).all()


def test_a_processor_of_transformers_leaves_our_png_as_it_is(folder: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    bounds = {"shortest_edge": SIGHT.least_pixels, "longest_edge": SIGHT.most_pixels}
    as_it_is = {"do_rescale": False, "do_normalize": False, "patch_size": 2, "merge_size": 2}
    processor = Qwen2VLImageProcessorPil(size=bounds, **as_it_is)
    for width, height in ((9, 6), (3, 3), (100, 40), (4, 4), (12, 16), (5, 900)):
        [found] = images(folder, picture(width, height))
        assert SIGHT.fitted(found.width, found.height) == (found.width, found.height)
        ours = png(found, "")
        with PIL.Image.open(io.BytesIO(ours)) as opened:
            made = processor(images=[opened], return_tensors="np")
        [[time, rows, columns]] = made["image_grid_thw"]
        assert (time, rows * 2, columns * 2) == (1, found.height, found.width)
        assert rows * columns // 4 == SIGHT.num_tokens(found.width, found.height)
        # [rows x columns / 4 squares, 2 x 2 patches each] of [channel, time, 2, 2] pixels
        patches = made["pixel_values"].reshape(rows // 2, columns // 2, 2, 2, 3, 2, 2, 2)
        assert (patches[..., 0, :, :] == patches[..., 1, :, :]).all(), "an image is twice the same frame"
        whole = patches[..., 0, :, :].transpose(0, 2, 5, 1, 3, 6, 4).reshape(found.height, found.width, 3)
        assert (whole == pixels_of(ours)).all()


def test_a_size_that_does_not_settle_is_refused(folder: Path) -> None:
    """Bounds so near to each other that an image is too small and too large by turns."""
    narrow = replace(SIGHT, least_pixels=17, most_pixels=31)
    with pytest.raises(UserError, match="image 1: 4 x 4 pixels have no size between the bounds of the model"):
        row_images(Row(folder / "train.jsonl", 4, {"images": picture(4, 4)}), "images", narrow)


def test_an_image_that_is_too_narrow_at_its_size_is_named_by_the_size_that_it_has(folder: Path) -> None:
    row = Row(folder / "train.jsonl", 3, {"images": picture(5, 1000)})
    with pytest.raises(
        UserError, match="5 x 1000 pixels come to the model as 4 x 1000 pixels: the longer side is more than"
    ):
        row_images(row, "images", replace(SIGHT, most_pixels=10**6))


def test_a_png_is_the_same_bytes_whenever_it_is_made_and_holds_pixels_alone(folder: Path) -> None:
    profile = PIL.Image.Exif()
    profile[0x010F] = "who made the camera"
    [found] = images(folder, picture(30, 20, kind="JPEG", exif=profile, icc_profile=b"x" * 300, dpi=(3, 3)))
    made = png(found, "")
    assert (found.width, found.height) == (16, 8)
    assert made == png(found, "")
    chunks, at = [], 8
    while at < len(made):
        chunks.append(made[at + 4 : at + 8])
        at += 12 + int.from_bytes(made[at : at + 4])
    assert set(chunks) == {b"IHDR", b"IDAT", b"IEND"}


def test_a_colour_that_counts_as_transparent_is_not_passed_on(folder: Path) -> None:
    [found] = images(folder, picture(8, 8, mode="P", transparency=3))
    assert b"tRNS" not in png(found, "")


def test_another_image_is_another_one(folder: Path) -> None:
    file = folder.parent / "pictures" / "a.png"
    ours = Image(DATA, 8, 8)
    others = [Image(picture(9, 6, 1), 8, 8), Image(DATA, 8, 4), Image(file, 8, 8)]
    assert len({identity(each) for each in (ours, *others)}) == 4
    was = identity(others[-1])
    assert was == f"a.png of {len(DATA)} bytes at 8 x 8"
    file.write_bytes(picture(9, 7))
    assert identity(others[-1]) != was
    file.unlink()
    assert identity(others[-1]) == "a.png, which is gone at 8 x 8"
