"""One try at a sample: what a cut leaves becomes a failure, which a collector would go on with."""

from __future__ import annotations

from typing import Any

from megarl.core.types import Prompt, Sample
from megarl.rollout.pieces import Decode
from megarl.rollout.single_turn import Episode, failed_sample
from megarl.serving.answers import Generation
from megarl.serving.sampling import Sampling


def no_text(ids: Any) -> str:
    raise AssertionError("a response of one piece has the server's text")


async def generate_sample(
    client: Any,
    prompt: Prompt,
    sampling: Sampling,
    *,
    sample_id: str,
    group_id: str,
    deadline_s: float,
    pieces: list[Generation] | None = None,
    piece_tokens: int | None = None,
    decode: Decode = no_text,
) -> Sample:
    """Ask once."""
    episode = Episode(prompt, sampling, sample_id, group_id, [] if pieces is None else pieces)
    sample = await episode.go_on(client, decode, deadline_s=deadline_s, piece_tokens=piece_tokens)
    return sample or failed_sample(prompt, "the server aborted it", sample_id=sample_id, group_id=group_id)
