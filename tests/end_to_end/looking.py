"""An environment that shows images which are nowhere else: squares of a color that only the episode's seed and turn say."""

from __future__ import annotations

import random
from typing import Any

from megarl.agents.environment import Done, EpisodeRow, Response, Turn
from tools.make_colors import COLORS, draw

TURNS = 3


class Look:
    """After the row's image shows another in each turn, of one square or two, with text before or behind it."""

    async def start(self, row: EpisodeRow) -> list[dict[str, Any]]:
        self._seed = row.seed
        return [*row.messages]

    async def step(self, response: Response) -> Turn | Done:
        if response.turn + 1 == TURNS:
            return Done(len(response.text) / 100)
        rng = random.Random(f"{self._seed} {response.turn} {len(response.text) % 2}")
        image = draw(tuple(rng.choices([*COLORS], k=1 + response.turn)), rng, 56)
        parts = [{"type": "text", "text": "And now?"}, {"type": "image", "image": image}]
        return Turn([{"role": "user", "content": parts[:: 1 if response.turn else -1]}], 0.1)

    async def close(self) -> None:
        """Nothing is held."""
