"""The images of a prompt while its samples are made: PNGs that all of its requests and samples share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megarl.core.types import Prompt, Sample, Status
from megarl.data.images import pngs
from megarl.serving.images import SentImages


class Pictures:
    """Made once, when they are first asked for, beside the event loop; kept as long as this is."""

    def __init__(self, prompt: Prompt, image_token: int | None, video_token: int | None = None) -> None:
        """image_token, video_token: of the model's Vision; None for a model that sees no images."""
        assert image_token is not None or not prompt.images, f"{prompt.id} has images that the model does not see"
        self._prompt, self._token, self._video_token = prompt, image_token, video_token
        self._making: asyncio.Task[tuple[bytes, ...]] | None = None

    async def made(self) -> tuple[bytes, ...]:
        """The PNGs, in their order. Raises UserError for an image that cannot be decoded."""
        if not self._prompt.images:
            return ()
        if self._making is None:
            self._making = asyncio.create_task(asyncio.to_thread(pngs, self._prompt.images, self._prompt.id))
        return await asyncio.shield(self._making)  # a request that is given up leaves them to the others

    async def sent(self) -> SentImages | None:
        """As requests have them; None where there are none. Raises as `made`."""
        found = await self.made()
        return SentImages(found, self._token, self._video_token) if self._token is not None and found else None

    async def put(self, samples: Sequence[Sample]) -> None:
        """Make them the samples', but for those that failed, of which nothing is trained on. Raises as `made`."""
        if not self._prompt.images:
            return
        for sample in samples:
            if sample.status is not Status.FAILED:
                sample.images = await self.made()
