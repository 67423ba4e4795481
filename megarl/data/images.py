"""Images of rows: what a row may give for one, at which size it comes to the model, and the PNG that it becomes.

Servers and the trainer both work on the same pixels, so that no two libraries resize an image differently. Not for where
images stand in a prompt (image_places.py), nor for tensors.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megarl.core.errors import UserError
from megarl.core.types import Image
from megarl.core.words import nearest_beside, shortened
from megarl.data.rows import Row, field_of, json_type

if TYPE_CHECKING:
    import PIL.Image  # loaded where an image is looked at: most runs have none

# What PIL reads by itself: of some other formats it calls programs.
FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
WANTED = 'wanted is a path (relative to the rows), a data URL, base64, bytes, or an object {"bytes": ..., "path": ...}'
SHORTEST_BASE64 = 64  # characters: no image is so small
MOST_FITS = 32
ORIENTATION, SIDEWAYS = 0x0112, (5, 6, 7, 8)  # EXIF's tag, and those of its values that exchange width and height
SHOWN = 300  # characters of a path, or of what PIL says, in an error
# How whole files of a format end; of others nothing but decoding tells.
ENDS = {"JPEG": b"\xff\xd9", "JPEG2000": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82", "GIF": b";"}


class Sight(Protocol):
    """What rows are told of how the model sees images: models/vision.Vision."""

    @property
    def image_token(self) -> int:
        """Stands for one square of an image."""

    @property
    def start_token(self) -> int:
        """Stands before an image's."""

    @property
    def end_token(self) -> int:
        """Stands behind an image's."""

    @property
    def video_token(self) -> int | None:
        """Stands for a video; None where there is no such token."""

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """Width and height at which an image of this size comes to the model. Raises ValueError."""

    def num_tokens(self, width: int, height: int) -> int:
        """Image tokens of an image that has been fitted."""


def row_images(row: Row, key: str, sight: Sight) -> tuple[Image, ...]:
    """The images of a row's field: a list of them, or one; none where it is missing or null.

    Headers and ends of files are read; what does not end as its format does is decoded, to know whether it is whole.
    Raises UserError naming file, line, field and the image's number.
    """
    value = field_of(row.fields, key)
    given = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(
        image_of(each, row.path.parent, f"{row.where}, field {key!r}, image {number}", sight)
        for number, each in enumerate(given, 1)
    )


def paths_of(images: Sequence[Image]) -> list[str] | None:
    """Where the images lie, for graders; None where some are bytes of the row."""
    paths = [str(each.source) for each in images if isinstance(each.source, Path)]
    return paths if images and len(paths) == len(images) else None


def identity(image: Image) -> str:
    """What tells an image from others: a digest of the row's bytes, or a file's name and its size; and the size it comes at.

    A file's content is not read: of many images that would take minutes at every start.
    """
    if isinstance(image.source, bytes):
        said = hashlib.blake2b(image.source, digest_size=16).hexdigest()
    else:
        try:
            said = f"{image.source.name} of {image.source.stat().st_size} bytes"
        except OSError:
            said = f"{image.source.name}, which is gone"
    return f"{said} at {image.width} x {image.height}"


def pngs(images: Sequence[Image], where: str) -> tuple[bytes, ...]:
    """Each image as `png` has it. where: the row, for errors. Raises UserError."""
    return tuple(png(image, f"{where}, image {number}") for number, image in enumerate(images, 1))


def png(image: Image, where: str) -> bytes:
    """`pixels`, as a PNG: the same bytes whenever it is made. where: for errors. Raises UserError."""
    written = io.BytesIO()
    pixels(image, where).save(written, "PNG", compress_level=1)
    return written.getvalue()


def pixels(image: Image, where: str) -> PIL.Image.Image:
    """The image, RGB, resized to its size; turned as EXIF has its orientation, and without alpha, as transformers has it.

    where: for errors. Raises UserError where it cannot be decoded.
    """
    import PIL.Image
    import PIL.ImageOps

    try:
        with _opened(image.source) as opened:
            upright = PIL.ImageOps.exif_transpose(opened) if _orientation(opened) is not None else opened
            found = upright.convert("RGB")
    except Exception as error:  # its decoders raise what they like for a file that is damaged
        raise _unreadable(image.source, where, error) from error
    if found.size != (image.width, image.height):
        found = found.resize((image.width, image.height), PIL.Image.Resampling.BICUBIC)
    found.info = {}  # a colour profile, or a colour that would count as transparent
    return found


def image_of(given: object, folder: Path, where: str, sight: Sight, most_pixels: int | None = None) -> Image:
    """What was given for an image. Only its header is read. folder: where relative paths begin. where: for errors.

    most_pixels: that it may have before it is made smaller. Raises UserError.
    """
    source = _source(given, folder, where)
    try:
        with _opened(source) as opened:
            width, height = opened.size
            if most_pixels is not None and width * height > most_pixels:
                raise UserError(
                    f"{where}: {width} x {height} pixels are over the bound of {most_pixels}. Make the image smaller."
                )
            if _orientation(opened) in SIDEWAYS:
                width, height = height, width
            if not _ends(source, opened.format):
                opened.load()
    except UserError:
        raise
    except Exception as error:  # as of `png`
        raise _unreadable(source, where, error) from error
    try:
        return Image(source, *_settled(width, height, sight), where)
    except ValueError as error:
        raise UserError(f"{where}: {error}. Cut the image, or leave the row out.") from error


def _ends(source: Path | bytes, kind: str | None) -> bool:
    """Whether it ends as whole files of its format do: one that was cut off in a download does not, as its header may."""
    end = ENDS.get(str(kind))
    if end is None:
        return True
    if isinstance(source, bytes):
        return source.endswith(end)
    with source.open("rb") as file:
        file.seek(-len(end), io.SEEK_END)
        return file.read() == end


def _orientation(opened: PIL.Image.Image) -> int | None:
    """What EXIF says of it. A PNG that has none before its pixels is not asked: PIL would decode it, to look behind them."""
    if opened.format == "PNG" and "exif" not in opened.info:
        return None
    return opened.getexif().get(ORIENTATION)


def _settled(width: int, height: int, sight: Sight) -> tuple[int, int]:
    """The size at which a server leaves it: a long narrow image is above the model's bounds where it was made smaller once."""
    size = sight.fitted(width, height)
    for _ in range(MOST_FITS):
        try:
            again = sight.fitted(*size)
        except ValueError as error:  # which names a size that nobody gave
            raise ValueError(f"{width} x {height} pixels come to the model as {error}") from error
        if again == size:
            return size
        size = again
    raise ValueError(
        f"{width} x {height} pixels have no size between the bounds of the model, nor of data.max_image_pixels"
    )


def _opened(source: Path | bytes) -> PIL.Image.Image:
    import PIL.Image

    return PIL.Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)


def _source(given: object, folder: Path, where: str) -> Path | bytes:
    if isinstance(given, dict) and ("bytes" in given or "path" in given):
        given = given.get("path") if given.get("bytes") is None else given["bytes"]
    if not isinstance(given, str | bytes):
        raise UserError(f"{where}: it is {json_type(given)}; {WANTED}.")
    if not given.strip():
        raise UserError(f"{where}: it is empty; {WANTED}.")
    if isinstance(given, bytes):
        return given
    if given.startswith("data:"):
        return _decoded(given.partition(",")[2], where)
    if given.startswith(("http://", "https://")):
        raise UserError(f"{where}: {_short(given)} is an address. Download the image, and give its path.")
    path = folder / given.removeprefix("file://")
    if len(given) >= SHORTEST_BASE64 and not _is_there(path):
        try:
            return _bytes(given)
        except ValueError:
            return path  # that it is not there is told where it is opened
    return path


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long for a file system
        return False


def _bytes(text: str) -> bytes:
    """Of base64, whose lines may be broken as MIME has them (RFC 2045, 6.8). Raises ValueError."""
    return base64.b64decode("".join(text.split()), validate=True)


def _decoded(text: str, where: str) -> bytes:
    try:
        return _bytes(text)
    except ValueError as error:
        raise UserError(f"{where}: a data URL whose content is no base64 ({error}); {WANTED}.") from error


def _unreadable(source: Path | bytes, where: str, error: Exception) -> UserError:
    import PIL.Image

    what = "its bytes" if isinstance(source, bytes) else _short(str(source))
    if isinstance(error, PIL.Image.DecompressionBombError):
        return UserError(
            f"{where}: {what} unpack to more pixels than PIL takes for an image ({error}). Make the image smaller, or leave the "
            "row out."
        )
    if isinstance(error, FileNotFoundError) and isinstance(source, Path):
        near = nearest_beside(source)
        hint = f" Did you mean {near}?" if near else ""
        return UserError(f"{where}: there is no file {what}.{hint} Correct the path, or leave the row out; {WANTED}.")
    if isinstance(error, OSError) and error.strerror:
        return UserError(f"{where}: {what} cannot be read: {error.strerror}. Mend it, or leave the row out.")
    reason = f" ({type(error).__name__}: {shortened(' '.join(str(error).split()), SHOWN)})"
    if isinstance(error, PIL.UnidentifiedImageError):  # which names an object of ours
        reason = ""
    return UserError(
        f"{where}: {what} cannot be decoded as an image{reason}. Formats are {', '.join(FORMATS)}. Write it "
        "again, or leave the row out."
    )


def _short(text: str) -> str:
    return shortened(text, SHOWN)
