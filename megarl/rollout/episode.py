"""One response in the making: asked for whole or in pieces, cut off and gone on with, token for token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from megarl.core.errors import DeadlineError
from megarl.core.types import IntArray, Prompt, Sample, VersionSpan
from megarl.rollout.single_turn import failed_sample, to_sample
from megarl.serving.client import Generation, ServerClient, ServerError, ServerUnreachableError
from megarl.serving.sampling import Sampling

# Without being asked to, a server may end a request a few times; one that does so for ever would be asked for ever.
MOST_ABORTS = 8

Decode = Callable[[IntArray], str]


@dataclass
class Episode:
    """A response to a prompt, and what there is of it so far."""

    prompt: Prompt
    sampling: Sampling
    sample_id: str
    group_id: str
    pieces: list[Generation] = field(default_factory=list)
    aborts: int = 0

    async def ask(
        self, client: ServerClient, decode: Decode, *, deadline_s: float, piece_tokens: int | None
    ) -> Sample | None:
        """Ask for what is missing. None: it was cut off, or a piece is there; ask again.

        A request that no server answers in time gives a sample of Status.FAILED, whose metadata says why under `failure`:
        one lost request must not end a step. decode: token ids to text, for responses of several pieces.
        """
        have = sum(len(piece.token_ids) for piece in self.pieces)
        left = self.sampling.max_tokens - have
        asked = min(left, piece_tokens or left)
        ids = np.concatenate([self.prompt.token_ids, *(piece.token_ids for piece in self.pieces)])
        try:
            piece = await client.generate(ids, replace(self.sampling, max_tokens=asked), deadline_s)
        except (ServerUnreachableError, ServerError, DeadlineError) as error:
            return self._failed(str(error))
        if len(piece.token_ids) or not self.pieces:
            self.pieces.append(piece)
        if piece.finish == "abort":
            self.aborts += 1
            self.pieces = [each for each in self.pieces if len(each.token_ids)]
            if have + len(piece.token_ids) < self.sampling.max_tokens:
                return self._failed(f"the server aborted it: {piece.finish_message}") if self._given_up() else None
        elif piece.finish == "length" and asked < left and len(piece.token_ids):
            return None
        return to_sample(self.prompt, join(self.pieces, decode), sample_id=self.sample_id, group_id=self.group_id)

    def cut_off(self) -> None:
        """It was ended because we asked for that: not the server's fault."""
        self.aborts = max(0, self.aborts - 1)

    def _given_up(self) -> bool:
        return self.aborts > MOST_ABORTS

    def _failed(self, why: str) -> Sample:
        return failed_sample(self.prompt, why, sample_id=self.sample_id, group_id=self.group_id)


def join(pieces: list[Generation], decode: Decode) -> Generation:
    """The pieces of a response, in their order, as one: spans are counted from its first token."""
    if len(pieces) == 1 and pieces[0].finish != "abort":
        return pieces[0]
    last = pieces[-1]
    token_ids = np.concatenate([piece.token_ids for piece in pieces])
    spans: list[VersionSpan] = []
    first = 0
    for piece in pieces:
        for span in piece.versions:
            begin, end = span.start + first, span.end + first
            if spans and spans[-1].version == span.version and spans[-1].end == begin:
                begin = spans.pop().start
            spans.append(VersionSpan(span.version, begin, end))
        first += len(piece.token_ids)
    return replace(
        last,
        token_ids=token_ids,
        logprobs=np.concatenate([piece.logprobs for piece in pieces]),
        text=decode(token_ids),
        finish="length" if last.finish == "abort" else last.finish,
        versions=tuple(spans),
        prompt_tokens=pieces[0].prompt_tokens,
        cached_tokens=pieces[0].cached_tokens,
        # The last piece's prompt is all that came before it: what it says of the routing is of the whole.
        routing=last.routing,
    )
