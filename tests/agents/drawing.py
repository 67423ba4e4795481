"""An environment that draws, for a process of its own: what it loads is loaded there."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pillow

from megarl.agents.environment import Done, EpisodeRow, Response, Turn


def drawing(width: int, height: int, seed: int) -> Pillow.Image:
    return Pillow.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def drawn(width: int, height: int, seed: int) -> bytes:
    written = io.BytesIO()
    drawing(width, height, seed).save(written, "PNG")
    return written.getvalue()


def part(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def data_url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


class Draws:
    """In a process of its own: a file that it has written, a drawing of PIL's, a data URL; or what is wrong."""

    def __init__(self, folder: str, wrong: str = "") -> None:
        self._path, self._wrong = Path(folder) / "drawn.png", wrong

    async def start(self, row: EpisodeRow) -> list[dict[str, Any]]:
        self._path.write_bytes(drawn(8, 4, 5))
        return [{"role": "user", "content": [part(str(self._path)), text("Look.")]}]

    async def step(self, response: Response) -> Turn | Done:
        if response.turn:
            return Done(1.0)
        url = {"type": "image_url", "image_url": {"url": data_url(drawn(4, 8, 7))}}
        shown: list[Any] = {"": [part(drawing(9, 9, 6)), url], "path": [part(self._path.with_name("none.png"))]}[
            self._wrong
        ]
        return Turn([{"role": "user", "content": shown}])

    async def close(self) -> None:
        pass
