"""An episode as token ids: what stands in the context, who wrote it, and with which log-probs and weights.

Ids are only ever appended, as they were sampled or as the template gave them: what is trained on is what the engine saw. Where a
template rewrites what stood there before, another sequence begins behind the one that the engine has seen: both are trained on.
Not for what the tokens mean, nor for where they come from: whoever answers a policy, or lets another, records its turns here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megarl.core.types import UNKNOWN_EXPERT, FloatArray, Prompt, RoutingArray, Sample, Status, TokenArray, VersionSpan
from megarl.data.blocks import laid
from megarl.rollout.pieces import join_routing
from megarl.serving.answers import Generation


@dataclass(frozen=True)
class _Part:
    """What somebody said. generation: None where it was not the policy. new: of these ids, what was not said before."""

    ids: TokenArray
    generation: Generation | None
    new: TokenArray


class Transcript:
    """The tokens of one episode so far. The prompt is what stood there before the policy first wrote: [P], at least one."""

    def __init__(self, prompt: TokenArray) -> None:
        assert len(prompt), "an episode begins with a prompt"
        self._prompt = np.ascontiguousarray(prompt, np.int32)
        self._parts: list[_Part] = []
        self._firsts: list[int] = []  # which parts another sequence begins with
        self.num_response = 0
        self.num_written = 0  # of them the policy's

    @property
    def prompt(self) -> TokenArray:
        """[P]."""
        return self._prompt

    @property
    def context(self) -> TokenArray:
        """All tokens of the last sequence: what the next request is asked with."""
        if self._firsts:
            return np.concatenate([part.ids for part in self._parts[self._firsts[-1] :]])
        return np.concatenate([self._prompt, *(part.ids for part in self._parts)])

    @property
    def response(self) -> TokenArray:
        """[R], all but the prompt; several sequences end to end."""
        return np.concatenate([np.zeros(0, np.int32), *(part.ids for part in self._parts)])

    @property
    def said(self) -> TokenArray:
        """[R or less], the response without what it says again at the beginnings of sequences."""
        return np.concatenate([np.zeros(0, np.int32), *(part.new for part in self._parts)])

    @property
    def starts(self) -> tuple[int, ...]:
        """Positions of the response at which another sequence begins."""
        ends = self._ends()
        return tuple(ends[first - 1] for first in self._firsts)

    @property
    def mask(self) -> NDArray[np.uint8]:
        """[R], 1 where the policy wrote."""
        parts = [np.full(len(part.ids), part.generation is not None, np.uint8) for part in self._parts]
        return np.concatenate([np.zeros(0, np.uint8), *parts])

    @property
    def logprobs(self) -> FloatArray:
        """[R], natural log; 0 where the policy did not write."""
        parts = [
            np.zeros(len(part.ids), np.float32) if part.generation is None else part.generation.logprobs
            for part in self._parts
        ]
        return np.concatenate([np.zeros(0, np.float32), *parts], dtype=np.float32)

    @property
    def turn_ends(self) -> list[int]:
        """Positions of the response behind each of the policy's turns."""
        return [end for end, part in zip(self._ends(), self._parts, strict=True) if part.generation is not None]

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """Which weights wrote what, in positions of the response. What the policy did not write is in none of the spans."""
        spans: list[VersionSpan] = []
        at = 0
        for part in self._parts:
            for span in () if part.generation is None else part.generation.versions:
                spans.append(VersionSpan(span.version, at + span.start, at + span.end))
            at += len(part.ids)
        return tuple(spans)

    def wrote(self, generation: Generation) -> None:
        """The policy's next turn: the answer to a request with `context`."""
        self._parts.append(_Part(generation.token_ids, generation, generation.token_ids))
        self.num_response += len(generation.token_ids)
        self.num_written += len(generation.token_ids)

    def told(self, ids: Sequence[int] | TokenArray) -> None:
        """What somebody else says next."""
        said = np.ascontiguousarray(ids, np.int32)
        self._parts.append(_Part(said, None, said))
        self.num_response += len(said)

    def begin(self, ids: TokenArray, new: TokenArray) -> None:
        """Another sequence: these ids stand there now in the place of all before, and the policy goes on behind them.

        new: what of them was not said before. A turn of the policy's has to stand before: each sequence is trained on.
        """
        assert self._parts and self._parts[-1].generation is not None, "a sequence that the policy wrote nothing in"
        self._firsts.append(len(self._parts))
        self._parts.append(_Part(np.ascontiguousarray(ids, np.int32), None, np.ascontiguousarray(new, np.int32)))
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
                starts=self.starts,
            )
        )

    def _ends(self) -> list[int]:
        """Positions of the response behind each part."""
        return [int(end) for end in np.cumsum([len(part.ids) for part in self._parts], dtype=np.int64)]

    def _routing(self) -> RoutingArray | None:
        """Of each token what the request says that put it through the model first; nobody did so with a sequence's last."""
        found: list[RoutingArray] = []
        for first, last in pairwise([0, *self._firsts, len(self._parts)]):
            parts = self._parts[first:last]
            written = [part.generation for part in parts if part.generation is not None]
            known = join_routing(written) if written else None
            if known is None:
                return None
            found.append(known)
            if last < len(self._parts):
                length = sum(len(part.ids) for part in parts) + (0 if first else len(self._prompt))
                unknown = np.full((length - len(known), known.shape[1]), UNKNOWN_EXPERT, np.int16)
                found.append(unknown)
        return np.concatenate(found)
