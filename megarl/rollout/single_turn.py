"""One prompt, one response: from token ids to a Sample. What several turns or tools need does not belong here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from megarl.core.errors import DeadlineError
from megarl.core.types import Prompt, Sample, Status
from megarl.data.blocks import laid
from megarl.rollout.pieces import Decode, extend, join, joined_text
from megarl.serving.answers import AnswerError, Generation
from megarl.serving.client import ServerClient, ServerError, ServerUnreachableError, nobody_there
from megarl.serving.sampling import Sampling

_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}


# Without being asked to, a server may cut a request off a few times; one that always does would be asked for ever.
MOST_CUTS = 8


@dataclass
class Episode:
    """One response in the making: what there is of it, in pieces."""

    prompt: Prompt
    sampling: Sampling
    sample_id: str
    group_id: str
    pieces: list[Generation] = field(default_factory=list)
    cuts: int = 0  # that nobody here asked for

    async def go_on(
        self,
        client: ServerClient,
        decode: Decode,
        *,
        deadline_s: float,
        piece_tokens: int | None = None,
        expects_cuts: Callable[[], bool] = lambda: False,
    ) -> Sample | None:
        """Ask for what is missing. None: it was cut off; what there is stays, and it can go on later.

        A request that no server answers in time gives a sample of Status.FAILED, whose metadata says why under `failure`:
        one lost request must not end a step. piece_tokens: ask for so many tokens at a time. decode: makes the text of a
        response of several pieces. expects_cuts: whether we had requests ended, as it is told of one.
        """
        try:
            ended = await extend(
                client,
                self.prompt,
                self.sampling,
                self.pieces,
                deadline_s=deadline_s,
                piece_tokens=piece_tokens,
                gives_up=expects_cuts,
            )
        except (ServerUnreachableError, ServerError, AnswerError, DeadlineError) as error:
            # Who wants no request at the servers does not wait for one that comes back.
            return None if nobody_there(error) and expects_cuts() else self._failed(str(error))
        if not ended:
            self.cuts += not expects_cuts()
            return self._failed("the server aborted it, again and again") if self.cuts > MOST_CUTS else None
        whole = join(self.pieces)
        if len(self.pieces) > 1 or whole.finish == "abort":
            whole = joined_text(self.prompt.token_ids, whole, self.sampling.stop, decode)
        if whole.finish == "abort":  # cut off at its longest
            whole = replace(whole, finish="length")
        return to_sample(self.prompt, whole, sample_id=self.sample_id, group_id=self.group_id)

    def _failed(self, why: str) -> Sample:
        return failed_sample(self.prompt, why, sample_id=self.sample_id, group_id=self.group_id)


def to_sample(prompt: Prompt, generation: Generation, *, sample_id: str, group_id: str) -> Sample:
    """A Sample of what a server generated; every token of the response was the policy's choice."""
    return laid(
        Sample(
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
    )


def failed_sample(prompt: Prompt, failure: str, *, sample_id: str, group_id: str) -> Sample:
    """A Sample without a response."""
    return Sample(
        id=sample_id,
        group_id=group_id,
        prompt=prompt,
        response_ids=np.zeros(0, np.int32),
        response_text="",
        loss_mask=np.zeros(0, np.uint8),
        rollout_logprobs=np.zeros(0, np.float32),
        versions=(),
        status=Status.FAILED,
        metadata={"failure": failure},
    )
