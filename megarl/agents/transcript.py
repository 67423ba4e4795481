"""An episode as token ids: what stands in the context, who wrote it, and with which log-probs and weights.

Ids are only ever appended, as they were sampled or as the template gave them: what is trained on is what the engine saw. Not for
what the tokens mean, nor for where they come from: whoever answers a policy, or lets another do so, records its turns here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megarl.core.types import FloatArray, Prompt, RoutingArray, Sample, Status, TokenArray, VersionSpan
from megarl.data.blocks import laid
from megarl.rollout.pieces import join_routing
from megarl.serving.answers import Generation


class Transcript:
    """The tokens of one episode so far. The prompt is what stood there before the policy first wrote: [P], at least one."""

    def __init__(self, prompt: TokenArray) -> None:
        assert len(prompt), "an episode begins with a prompt"
        self._prompt = np.ascontiguousarray(prompt, np.int32)
        self._parts: list[tuple[TokenArray, Generation | None]] = []  # None: not the policy's
        self.num_response = 0
        self.num_written = 0  # of them the policy's

    @property
    def prompt(self) -> TokenArray:
        """[P]."""
        return self._prompt

    @property
    def context(self) -> TokenArray:
        """All tokens: what the next request is asked with."""
        return np.concatenate([self._prompt, *(ids for ids, _ in self._parts)])

    @property
    def response(self) -> TokenArray:
        """[R], all but the prompt."""
        return self.context[len(self._prompt) :]

    @property
    def mask(self) -> NDArray[np.uint8]:
        """[R], 1 where the policy wrote."""
        parts = [np.full(len(ids), generation is not None, np.uint8) for ids, generation in self._parts]
        return np.concatenate([np.zeros(0, np.uint8), *parts])

    @property
    def logprobs(self) -> FloatArray:
        """[R], natural log; 0 where the policy did not write."""
        parts = [
            np.zeros(len(ids), np.float32) if generation is None else generation.logprobs
            for ids, generation in self._parts
        ]
        return np.concatenate([np.zeros(0, np.float32), *parts], dtype=np.float32)

    @property
    def turn_ends(self) -> list[int]:
        """Positions of the response behind each of the policy's turns."""
        ends = np.cumsum([len(ids) for ids, _ in self._parts], dtype=np.int64)
        return [int(end) for end, (_, generation) in zip(ends, self._parts, strict=True) if generation is not None]

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """Which weights wrote what, in positions of the response. What the policy did not write is in none of the spans."""
        spans: list[VersionSpan] = []
        at = 0
        for ids, generation in self._parts:
            for span in () if generation is None else generation.versions:
                spans.append(VersionSpan(span.version, at + span.start, at + span.end))
            at += len(ids)
        return tuple(spans)

    def wrote(self, generation: Generation) -> None:
        """The policy's next turn: the answer to a request with `context`."""
        self._parts.append((generation.token_ids, generation))
        self.num_response += len(generation.token_ids)
        self.num_written += len(generation.token_ids)

    def told(self, ids: Sequence[int] | TokenArray) -> None:
        """What somebody else says next."""
        self._parts.append((np.ascontiguousarray(ids, np.int32), None))
        self.num_response += len(ids)

    def sample(self, *, sample_id: str, group_id: str, prompt: Prompt, text: str, status: Status) -> Sample:
        """The episode as a sample. prompt: the row's, with these ids in the place of its own. text: of the response."""
        assert np.array_equal(prompt.token_ids, self._prompt), f"{sample_id}: its prompt is another"
        return laid(
            Sample(
                id=sample_id,
                group_id=group_id,
                prompt=prompt,
                response_ids=self.response,
                response_text=text,
                loss_mask=self.mask,
                rollout_logprobs=self.logprobs,
                versions=self.versions,
                status=status,
                routing=self._routing(),
            )
        )

    def _routing(self) -> RoutingArray | None:
        """Of each token what the request says that put it through the model first."""
        written = [generation for _, generation in self._parts if generation is not None]
        return join_routing(written) if written else None
