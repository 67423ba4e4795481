"""One prompt, one response: from token ids to a Sample. What several turns or tools need does not belong here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megarl.core.errors import DeadlineError
from megarl.core.types import Prompt, Sample, Status
from megarl.rollout.pieces import Decode, extend, join, joined_text
from megarl.serving.answers import AnswerError, Generation
from megarl.serving.client import ServerClient, ServerError, ServerUnreachableError
from megarl.serving.sampling import Sampling

_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}


async def generate_sample(
    client: ServerClient,
    prompt: Prompt,
    sampling: Sampling,
    *,
    sample_id: str,
    group_id: str,
    deadline_s: float,
    pieces: list[Generation] | None = None,
    piece_tokens: int | None = None,
    decode: Decode | None = None,
) -> Sample:
    """Sample one response to a prompt, or go on with one.

    pieces: what there is of the response; grows as more comes, so that the caller can go on with it after a sample that
    failed. piece_tokens: ask for so many tokens at a time. decode: makes the text of a response of several pieces.

    A request that no server answers in time, or that a server cut off, gives a sample of Status.FAILED, whose metadata says
    why under `failure`: one lost request must not end a step.
    """
    pieces = [] if pieces is None else pieces
    try:
        ended = await extend(client, prompt, sampling, pieces, deadline_s=deadline_s, piece_tokens=piece_tokens)
    except (ServerUnreachableError, ServerError, AnswerError, DeadlineError) as error:
        return failed_sample(prompt, str(error), sample_id=sample_id, group_id=group_id)
    if not ended:
        return failed_sample(prompt, "the server aborted it", sample_id=sample_id, group_id=group_id)
    generation = join(pieces)
    if len(pieces) > 1 or generation.finish == "abort":
        assert decode is not None, f"{sample_id}: a response of {len(pieces)} pieces needs `decode` for its text"
        generation = joined_text(prompt.token_ids, generation, sampling.stop, decode)
    if generation.finish == "abort":  # cut off at its longest
        generation = replace(generation, finish="length")
    return to_sample(prompt, generation, sample_id=sample_id, group_id=group_id)


def to_sample(prompt: Prompt, generation: Generation, *, sample_id: str, group_id: str) -> Sample:
    """A Sample of what a server generated; every token of the response was the policy's choice."""
    return Sample(
        id=sample_id,
        group_id=group_id,
        prompt=prompt,
        response_ids=generation.token_ids,
        response_text=generation.text,
        loss_mask=np.ones(len(generation.token_ids), np.uint8),
        rollout_logprobs=generation.logprobs,
        versions=generation.versions,
        status=_STATUS[generation.finish],
        routing=generation.routing,
    )


def failed_sample(prompt: Prompt, failure: str, *, sample_id: str, group_id: str) -> Sample:
    """A Sample without a response."""
    return Sample(
        id=sample_id,
        group_id=group_id,
        prompt=prompt,
        response_ids=np.zeros(0, np.int64),
        response_text="",
        loss_mask=np.zeros(0, np.uint8),
        rollout_logprobs=np.zeros(0, np.float32),
        versions=(),
        status=Status.FAILED,
        metadata={"failure": failure},
    )
