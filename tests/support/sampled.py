"""One try at a sample: what a cut leaves becomes a failure, which a collector would go on with."""

from __future__ import annotations

from typing import Any

from megarl.core.types import Prompt, Sample
from megarl.rollout.asking import Request, RequestFailedError
from megarl.rollout.attempt import Attempt, failed_sample
from megarl.rollout.pieces import Decode
from megarl.rollout.single_turn import to_sample
from megarl.serving.answers import Generation
from megarl.serving.sampling import Sampling


def no_text(ids: Any) -> str:
    raise AssertionError("a response of one piece has the server's text")


async def generate_sample(
    client: Any,
    prompt: Prompt,
    sampling: Sampling,
    *,
    deadline_s: float,
    step: int = 1,
    index: int = 0,
    pieces: list[Generation] | None = None,
    piece_tokens: int | None = None,
    decode: Decode = no_text,
) -> Sample:
    """Ask once."""
    attempt = Attempt(prompt, sampling, 0, "train", step, index)
    request = Request(prompt.token_ids, sampling, pieces=[] if pieces is None else pieces)
    try:
        answer = await request.go_on(client, decode, deadline_s=deadline_s, piece_tokens=piece_tokens)
    except RequestFailedError as error:
        return failed_sample(attempt, str(error))
    return failed_sample(attempt, "the server aborted it") if answer is None else to_sample(attempt, answer)
