"""On which sequences a weight sync is verified: a few of the last step, or of the data before there was one.

They are text, without tokens of images. Where the vision tower learns, a prompt with its images comes behind them: text says
nothing of a tower. Not for asking anybody (megarl/sync/verify.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from megarl.core.types import Prompt, Sample, TokenArray
from megarl.rollout.pictures import Pictures
from megarl.serving.images import SentImages

SEQUENCES = 4
TOKENS = 128
LOOKED_AT = 64  # prompts with images of the data, of which the shortest is shown


@dataclass(frozen=True)
class Probe:
    """Token sequences of at least two tokens. images: those of the last one; None where it has none."""

    rows: list[list[int]]
    images: SentImages | None = None


class Prober:
    """Of one collector."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        pictures: Callable[[Prompt], Pictures],
        image_token: int | None,
        *,
        tower_learns: bool,
    ) -> None:
        """prompts: the data. image_token: of a model that sees images."""
        self._prompts, self._pictures, self._image_token = prompts, pictures, image_token
        self._shows = tower_learns and image_token is not None
        self._rows: list[list[int]] = []
        self._seen: Prompt | None = None
        self._made: tuple[Prompt, SentImages | None] | None = None

    def take(self, samples: Sequence[Sample]) -> None:
        """Samples that are trained on. No more is kept of them than what is asked."""
        self._rows = self._some([(sample.prompt.token_ids, sample.response_ids) for sample in samples])
        if self._shows:
            self._seen = _shortest(sample.prompt for sample in samples) or self._seen

    async def probe(self) -> Probe:
        """Of the last step where there was one. Raises UserError for an image that cannot be decoded."""
        rows = self._rows or self._some([(prompt.token_ids,) for prompt in self._prompts])
        if self._shows and self._seen is None:
            self._seen = _shortest(islice((prompt for prompt in self._prompts if prompt.images), LOOKED_AT))
        if self._seen is None:
            return Probe(rows)
        if self._made is None or self._made[0] is not self._seen:
            self._made = self._seen, await self._pictures(self._seen).sent()
        return Probe([*rows, self._seen.token_ids.tolist()], self._made[1])

    def _some(self, sequences: Sequence[tuple[TokenArray, ...]]) -> list[list[int]]:
        """The last tokens of a few of these, each given in pieces, without tokens of images."""
        texts = [tuple(ids[ids != self._image_token] for ids in pieces) for pieces in sequences]
        usable = [pieces for pieces in texts if sum(map(len, pieces)) > 1]
        # Neighbours are of the same group and say much the same: spread over the step.
        chosen = usable[:: max(1, len(usable) // SEQUENCES)][:SEQUENCES]
        return [np.concatenate(pieces)[-TOKENS:].tolist() for pieces in chosen]


def _shortest(prompts: Iterable[Prompt]) -> Prompt | None:
    """Of those with images."""
    return min((each for each in prompts if each.images), key=lambda each: len(each.token_ids), default=None)
