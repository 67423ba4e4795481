"""The images of a prompt while its samples are made, and those of an episode: PNGs that requests and samples share."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Protocol

from megarl.core.types import Image, Prompt, Sample, Status
from megarl.data.images import png, pngs
from megarl.serving.images import SentImages


class Sends(Protocol):
    """What a request has of images."""

    async def sent(self) -> SentImages | None:
        """As requests have them; None where there are none. Raises UserError for an image that cannot be decoded."""


class Pictures:
    """Made once, when they are first asked for, beside the event loop; kept as long as this is."""

    def __init__(self, prompt: Prompt, image_token: int | None, video_token: int | None = None) -> None:
        """image_token, video_token: of the model's Vision; None for a model that sees no images."""
        assert image_token is not None or not prompt.images, f"{prompt.id} has images that the model does not see"
        self._prompt, self._token, self._video_token = prompt, image_token, video_token
        self._making: asyncio.Task[tuple[bytes, ...]] | None = None
        self._others: dict[tuple[bytes, int, int], asyncio.Task[bytes]] = {}

    async def made(self) -> tuple[bytes, ...]:
        """The PNGs, in their order. Raises UserError for an image that cannot be decoded."""
        if not self._prompt.images:
            return ()
        if self._making is None:
            self._making = asyncio.create_task(asyncio.to_thread(pngs, self._prompt.images, self._prompt.id))
        return await asyncio.shield(self._making)  # a request that is given up leaves them to the others

    async def other(self, image: Image, where: str) -> bytes:
        """The PNG of an image that is none of the prompt's, and has its bytes in itself: those of a group share it.

        where: for errors. Raises as `made`.
        """
        assert isinstance(image.source, bytes), where
        key = hashlib.blake2b(image.source, digest_size=16).digest(), image.width, image.height
        if key not in self._others:
            self._others[key] = asyncio.create_task(asyncio.to_thread(png, image, where))
        return await asyncio.shield(self._others[key])

    async def sent(self) -> SentImages | None:
        """As requests have them; None where there are none. Raises as `made`."""
        return self.as_sent(await self.made())

    def as_sent(self, found: tuple[bytes, ...]) -> SentImages | None:
        """The same of these PNGs."""
        return SentImages(found, self._token, self._video_token) if self._token is not None and found else None

    async def put(self, samples: Sequence[Sample]) -> None:
        """Make them the samples', with what their environments showed, but for those that failed, of which nothing is trained on.

        Raises as `made`.
        """
        for sample in samples:
            if sample.status is not Status.FAILED and (sample.prompt.images or sample.shown):
                sample.images = among(await self.made() if sample.prompt.images else (), sample.shown)


class EpisodePictures:
    """Of one episode: its prompt's images, and those that its environment shows, in the order of their tokens.

    prompts: whether the prompt's are in it. shown: as of Sample. count: of all that stand in it so far.
    """

    def __init__(
        self, pictures: Pictures, *, prompts: bool = True, shown: tuple[tuple[int, bytes], ...] = (), count: int = 0
    ) -> None:
        self._pictures, self._prompts, self.shown, self._count = pictures, prompts, shown, count

    async def with_more(self, images: Sequence[Image | None], where: str) -> EpisodePictures:
        """With those that stand next; None is the prompt's next. where: for errors.

        Raises UserError for one that is damaged.
        """
        more = [
            (self._count + number, await self._pictures.other(image, f"{where}, image {number + 1}"))
            for number, image in enumerate(images)
            if image is not None
        ]
        count = self._count + len(images)
        return EpisodePictures(self._pictures, prompts=self._prompts, shown=(*self.shown, *more), count=count)

    async def sent(self) -> SentImages | None:
        """As of Sends."""
        return self._pictures.as_sent(among(await self._pictures.made() if self._prompts else (), self.shown))


def among(prompts: Sequence[bytes], shown: Sequence[tuple[int, bytes]]) -> tuple[bytes, ...]:
    """A prompt's images, and among them those that an environment showed, each at its number."""
    found = list(prompts)
    for number, image in shown:
        assert number <= len(found), f"image {number} of {len(found)}"
        found.insert(number, image)
    return tuple(found)
