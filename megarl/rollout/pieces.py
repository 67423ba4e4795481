"""A response that comes in pieces: cut off by a pause, a server's death, or on purpose, and gone on with where it stopped.

Each piece was asked for with the prompt and all tokens before it, so that the whole is what one request could have given:
every token drawn from the policy given all before it. Not for whose turn it is, nor for failures (asking.py).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from megarl.core.types import RoutingArray, TokenArray, VersionSpan
from megarl.serving.answers import Generation
from megarl.serving.client import ServerClient
from megarl.serving.images import SentImages
from megarl.serving.sampling import Sampling

# Token ids to text, special tokens left out: a tokenizer's decode.
Decode = Callable[[Sequence[int]], str]

# How many tokens of the prompt a server decodes along, so that the first token is spaced as it is within a text.
CONTEXT_TOKENS = 5


async def extend(
    client: ServerClient,
    token_ids: TokenArray,
    sampling: Sampling,
    pieces: list[Generation],
    *,
    deadline_s: float,
    piece_tokens: int | None = None,
    gives_up: Callable[[], bool] = lambda: False,
    images: SentImages | None = None,
) -> bool:
    """Ask for what a response still lacks, and whether it has ended; False where the server cut it off.

    token_ids: [P], what stands before the response. pieces: what there is of it, in order; grows as more comes, so that the
    caller has it however this ends: by an error, by a cancellation, or by a cut. piece_tokens: ask for so many at most at a
    time: as much is lost with a server that dies. deadline_s: for all of it. gives_up: of each request, as of
    `ServerClient.generate`. images: of the prompt.

    The last token of a piece that was cut off is left out and drawn anew, and where servers guess ahead as many as its last
    pass may have given: the server did not look whether one of them ends the response. When a response is cut off does not
    depend on its tokens, so that what is sampled stays the policy's.

    Raises DeadlineError, ServerUnreachableError, ServerError, AnswerError.
    """
    clock = asyncio.get_running_loop().time
    end, left = clock() + deadline_s, deadline_s
    while (lacking := sampling.max_tokens - num_tokens(pieces)) > 0 and not (pieces and pieces[-1].finish == "stop"):
        asked = min(lacking, piece_tokens or lacking)
        piece = await client.generate(
            np.concatenate([token_ids, *(piece.token_ids for piece in pieces)]),
            replace(sampling, max_tokens=asked),
            left,
            gives_up=gives_up,
            images=images,
        )
        left = max(0.0, end - clock())
        received = len(piece.token_ids)
        if piece.finish == "abort":
            if received > piece.most_a_pass:
                pieces.append(piece.first(received - piece.most_a_pass))
            return False
        pieces.append(piece)
        if received < asked:  # an end, or the model's context is full
            return True
    return True


def num_tokens(pieces: Sequence[Generation]) -> int:
    """How many tokens the pieces have together."""
    return sum(len(piece.token_ids) for piece in pieces)


def join(pieces: Sequence[Generation]) -> Generation:
    """Pieces that follow each other as one generation: prompt and cache are the first's, the end is the last's.

    The text is the texts one after the other: see `joined_text` where a character may be cut in two.
    """
    if len(pieces) == 1:
        return pieces[0]
    first, last = pieces[0], pieces[-1]
    return replace(
        last,
        token_ids=np.concatenate([piece.token_ids for piece in pieces]),
        logprobs=np.concatenate([piece.logprobs for piece in pieces]),
        text="".join(piece.text for piece in pieces),
        versions=_join_spans(pieces),
        prompt_tokens=first.prompt_tokens,
        cached_tokens=first.cached_tokens,
        routing=join_routing(pieces),
        passes=sum(piece.passes or 0 for piece in pieces) or None,
    )


def joined_text(prompt: TokenArray, whole: Generation, stop: Sequence[str], decode: Decode) -> Generation:
    """A joined generation with the text that one request would have had, cut where that would have ended.

    A server looks for a stop string in what it generates itself: one that begins in a piece and ends in the next is found
    here.
    """
    context = [int(token) for token in prompt[-CONTEXT_TOKENS:]]
    spaces = len(decode(context))
    ids = [int(token) for token in whole.token_ids]

    def text_of(count: int) -> str:
        return decode([*context, *ids[:count]])[spaces:]

    def found(count: int) -> list[tuple[int, str]]:
        text = text_of(count)
        return [(at, string) for string in stop if (at := text.find(string)) >= 0]

    if found(len(ids)):
        count = bisect_left(range(len(ids)), True, key=lambda count: bool(found(count)))
        at, string = min(found(count))
        return replace(whole.first(count), text=text_of(count)[:at], finish="stop", matched=string)
    ended = isinstance(whole.matched, int)
    return replace(whole, text=text_of(len(ids) - 1 if ended else len(ids)))


def _join_spans(pieces: Sequence[Generation]) -> tuple[VersionSpan, ...]:
    spans: list[VersionSpan] = []
    offset = 0
    for piece in pieces:
        for span in piece.versions:
            if spans and spans[-1].version == span.version:
                spans[-1] = spans[-1]._replace(end=offset + span.end)
            else:
                spans.append(VersionSpan(span.version, offset + span.start, offset + span.end))
        offset += len(piece.token_ids)
    return tuple(spans)


def join_routing(pieces: Sequence[Generation]) -> RoutingArray | None:
    """Of each token what the piece says that put it through the model first: a piece speaks of all tokens before it too."""
    known = [piece.routing for piece in pieces if piece.routing is not None]
    if len(known) < len(pieces):
        return None
    parts = [known[0]]
    done = len(known[0])
    for routing in known[1:]:
        parts.append(routing[done:])
        done = max(done, len(routing))
    return np.concatenate(parts)
