"""One prompt, one response: from token ids to a Sample. What several turns or tools need does not belong here."""

from __future__ import annotations

import numpy as np

from megarl.core.types import Sample, Status
from megarl.data.blocks import laid
from megarl.rollout.asking import Asker, Request, RequestFailedError
from megarl.rollout.attempt import Attempt, failed_sample
from megarl.serving.answers import Generation

PER_PASS = "tokens_per_pass"  # in Sample.numbers, of servers that guess ahead
_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}


class SingleTurn:
    """The Player of recipes without an agent: the response to the prompt is the sample."""

    async def play(self, attempt: Attempt, asker: Asker) -> Sample:
        """Ask once. A request that no server answers in time gives a sample of Status.FAILED: it must not end a step."""
        request = Request(attempt.prompt.token_ids, attempt.seeded(), pictures=attempt.pictures)
        try:
            answer = await asker.ask(request, step=attempt.step, expected_tokens=attempt.expected_tokens)
        except RequestFailedError as error:
            return failed_sample(attempt, str(error))
        return to_sample(attempt, answer)

    async def close(self) -> None:
        """Nothing is held."""


def to_sample(attempt: Attempt, generation: Generation) -> Sample:
    """A Sample of what a server generated; every token of the response was the policy's choice."""
    return laid(
        Sample(
            id=attempt.sample_id,
            group_id=attempt.group_id,
            prompt=attempt.prompt,
            response_ids=generation.token_ids,
            response_text=generation.text,
            loss_mask=np.ones(len(generation.token_ids), np.uint8),
            rollout_logprobs=generation.logprobs,
            versions=generation.versions,
            status=_STATUS[generation.finish],
            routing=generation.routing,
            numbers={PER_PASS: len(generation.token_ids) / generation.passes} if generation.passes else {},
        )
    )
