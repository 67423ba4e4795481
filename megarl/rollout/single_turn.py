"""One prompt, one response: from token ids to a Sample. What several turns or tools need does not belong here."""

from __future__ import annotations

import numpy as np

from megarl.core.errors import DeadlineError
from megarl.core.types import Prompt, Sample, Status
from megarl.serving.client import Generation, ServerClient, ServerError, ServerUnreachableError
from megarl.serving.sampling import Sampling

_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}


async def generate_sample(
    client: ServerClient, prompt: Prompt, sampling: Sampling, *, sample_id: str, group_id: str, deadline_s: float
) -> Sample:
    """Sample one response to a prompt.

    A request that no server answers in time gives a sample of Status.FAILED, whose metadata says why under `failure`:
    one lost request must not end a step.
    """
    try:
        generation = await client.generate(prompt.token_ids, sampling, deadline_s)
    except (ServerUnreachableError, ServerError, DeadlineError) as error:
        return failed_sample(prompt, str(error), sample_id=sample_id, group_id=group_id)
    if generation.finish == "abort":
        return failed_sample(
            prompt, f"the server aborted it: {generation.finish_message}", sample_id=sample_id, group_id=group_id
        )
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
