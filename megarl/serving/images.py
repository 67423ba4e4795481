"""The images of a request, as SGLang's /generate takes them beside token ids. Not for how they are made (data/images.py)."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

from megarl.core.types import TokenArray
from megarl.data.image_places import collapsed
from megarl.serving.answers import AnswerError


@dataclass(frozen=True)
class SentImages:
    """PNGs in the order of their tokens. token: what stands for one square of an image in token ids. video_token: for a video."""

    pngs: tuple[bytes, ...] = field(repr=False)
    token: int
    video_token: int | None = None

    def body(self, token_ids: TokenArray) -> dict[str, Any]:
        """What of a request's body is said of them: a server takes one token an image, and makes of it as many as there are.

        Raises AnswerError where a piece of the response, behind the prompt, has that token, or that of videos.
        """
        ids = collapsed(token_ids, self.token)
        places = int((ids == self.token).sum())
        assert places >= len(self.pngs), (places, len(self.pngs))
        for token, what, is_there in (
            (self.token, "an image", places > len(self.pngs)),
            (self.video_token, "a video", self.video_token is not None and self.video_token in ids),
        ):
            # A router that sees a few such requests fail sends nobody any more to their server.
            if is_there:
                raise AnswerError(
                    f"the response cannot go on behind token {token}, which the policy wrote and a server takes for {what}"
                )
        return {"input_ids": ids, "image_data": [_url(png) for png in self.pngs]}


def _url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
