"""A response in pieces is the response that one request would have given, however often it is cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.types import IntArray, Prompt, Status, VersionSpan
from megarl.rollout.pieces import extend, join, num_tokens
from megarl.serving.answers import Generation
from megarl.serving.client import ServerUnreachableError
from megarl.serving.sampling import Sampling
from tests.support.sampled import generate_sample

PROMPT = Prompt("p:0", np.array([7, 8, 9]), "", "")
LONGEST = 24
END = 2
LETTERS = "abcdefghij"


def decode(ids: Sequence[int]) -> str:
    return "".join(LETTERS[token % 10] for token in ids if token != END)


class Scripted:
    """A server whose next token follows from all before it; cuts requests off, or dies, as a script says.

    script: for each request how many tokens it gets before it is cut off (None: all), negative: it dies. Each request is
    served by weights one version later; a token's log-prob is minus its position.
    """

    def __init__(self, length: int, script: Sequence[int | None]) -> None:
        self.length = length
        self.script = list(script)
        self.asked: list[int] = []
        self.version = 0

    async def generate(self, token_ids: IntArray, sampling: Sampling, deadline_s: float, **_: object) -> Generation:
        assert token_ids[:3].tolist() == [7, 8, 9]
        begun = len(token_ids) - 3
        assert token_ids[3:].tolist() == self.whole()[:begun]
        self.asked.append(sampling.max_tokens)
        cut = self.script.pop(0) if self.script else None
        if cut is not None and cut < 0:
            raise ServerUnreachableError("server 0 died")
        rest = self.whole()[begun : begun + sampling.max_tokens]
        finish: Any = "stop" if rest and rest[-1] == END else "length"
        if cut is not None and cut < len(rest):
            rest, finish = rest[:cut], "abort"
        self.version += 1
        positions = begun + np.arange(len(rest))
        return Generation(
            token_ids=np.array(rest, np.int64),
            logprobs=-positions.astype(np.float32),
            text=decode(rest),
            finish=finish,
            versions=(VersionSpan(self.version, 0, len(rest)),) if rest else (),
            prompt_tokens=len(token_ids),
            cached_tokens=0,
            routing=np.repeat(np.arange(len(token_ids) + len(rest) - 1), 2).reshape(-1, 2).astype(np.int16),
            matched=END if finish == "stop" else None,
        )

    def whole(self) -> list[int]:
        """All tokens that it would give."""
        return [10 + at * at % 7 for at in range(self.length - 1)] + [END]


def sample(server: Any, pieces: list[Generation], piece_tokens: int | None, stop: tuple[str, ...] = ()) -> Any:
    return asyncio.run(
        generate_sample(
            server,
            PROMPT,
            Sampling(LONGEST, stop=stop),
            deadline_s=5.0,
            pieces=pieces,
            piece_tokens=piece_tokens,
            decode=decode,
        )
    )


@given(
    st.integers(1, 40),
    st.lists(st.none() | st.integers(-1, 12), max_size=12),
    st.none() | st.integers(1, 30),
)
def test_however_it_is_cut_it_is_the_whole(length: int, script: list[int | None], piece_tokens: int | None) -> None:
    server, pieces = Scripted(length, script), list[Generation]()
    attempts = 1
    while (made := sample(server, pieces, piece_tokens)).status is Status.FAILED:
        attempts += 1
        assert attempts <= len(script) + 1
        # What it has is the beginning of what it will be.
        if pieces:
            assert join(pieces).token_ids.tolist() == server.whole()[: num_tokens(pieces)]
    expected = server.whole()[:LONGEST]
    assert made.response_ids.tolist() == expected
    assert made.rollout_logprobs.tolist() == [-float(at) for at in range(len(expected))]
    assert made.status is (Status.COMPLETED if length <= LONGEST else Status.TRUNCATED)
    assert made.response_text == decode(expected)
    # Spans follow each other over the whole, each of the request that made it.
    ends = [span.end for span in made.versions]
    assert [span.start for span in made.versions] == [0, *ends[:-1]] and ends[-1] == len(expected)
    versions = [span.version for span in made.versions]
    assert versions == sorted(set(versions))
    # Each row of routing is the first that put that token through the model.
    assert made.routing[:, 0].tolist() == list(range(3 + len(expected) - 1))
    assert all(asked <= (piece_tokens or LONGEST) for asked in server.asked)


def test_a_server_that_dies_loses_one_piece_at_most() -> None:
    server, pieces = Scripted(20, [None, None, -1]), list[Generation]()
    assert sample(server, pieces, 6).metadata["failure"] == "server 0 died"
    assert num_tokens(pieces) == 12
    assert sample(server, pieces, 6).status is Status.COMPLETED
    assert server.asked == [6, 6, 6, 6, 6]  # the third died; the last has two


def test_the_last_token_of_a_cut_is_drawn_anew_because_it_may_be_the_end() -> None:
    server, pieces = Scripted(8, [7]), list[Generation]()
    server.whole = lambda: [10, 11, 12, 13, 14, 15, END, 17]  # type: ignore[method-assign]
    first = asyncio.run(extend(server, PROMPT.token_ids, Sampling(LONGEST), pieces, deadline_s=5.0))  # type: ignore[arg-type]
    assert first is False and join(pieces).token_ids.tolist() == [10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize("piece_tokens", [1, 3, 4, 5])
def test_a_stop_string_that_begins_in_one_piece_and_ends_in_the_next_ends_the_response(piece_tokens: int) -> None:
    server = Scripted(20, [])
    text = decode(server.whole())
    made = sample(server, [], piece_tokens, stop=(text[3:6], "zz"))
    assert made.response_text == text[:3]
    assert made.response_ids.tolist() == server.whole()[:6]
    assert made.status is Status.COMPLETED


def test_a_character_of_two_tokens_is_whole_in_the_text_although_a_cut_was_between_them() -> None:
    def two_by_two(ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token > 20).decode("utf-8", "replace")

    made = bytes("é", "utf-8")
    server = Scripted(3, [])
    server.whole = lambda: [*made, END]  # type: ignore[method-assign]
    result = asyncio.run(
        generate_sample(
            server,  # type: ignore[arg-type]
            PROMPT,
            Sampling(LONGEST),
            deadline_s=5.0,
            piece_tokens=1,
            decode=two_by_two,
        )
    )
    assert result.response_text == "é"


class Guessing:
    """A server that gives several tokens a pass, and is cut off behind one that it has not looked at."""

    def __init__(self, tokens: list[int], most_a_pass: int) -> None:
        self._tokens, self._most = tokens, most_a_pass
        self.asked: list[list[int]] = []

    async def generate(self, token_ids: IntArray, sampling: Sampling, deadline_s: float, **_: object) -> Generation:
        self.asked.append(token_ids[3:].tolist())
        first = len(self.asked) == 1
        given = self._tokens if first else [21, END]
        return Generation(
            token_ids=np.array(given, np.int64),
            logprobs=np.zeros(len(given), np.float32),
            text="",
            finish="abort" if first else "stop",
            versions=(VersionSpan(1, 0, len(given)),),
            prompt_tokens=len(token_ids),
            cached_tokens=0,
            passes=2,
            most_a_pass=self._most,
        )


@pytest.mark.parametrize(
    ("tokens", "most", "kept"),
    [([11, 12, END, 13], 1, [11, 12, END]), ([11, 12, END, 13], 3, [11]), ([11, END, 13], 3, []), ([11], 4, [])],
)
def test_none_of_a_pass_that_was_not_looked_at_is_kept(tokens: list[int], most: int, kept: list[int]) -> None:
    server, pieces = Guessing(tokens, most), list[Generation]()
    ask = extend(server, PROMPT.token_ids, Sampling(LONGEST), pieces, deadline_s=5.0)  # type: ignore[arg-type]
    assert not asyncio.run(ask)
    ask = extend(server, PROMPT.token_ids, Sampling(LONGEST), pieces, deadline_s=5.0)  # type: ignore[arg-type]
    assert asyncio.run(ask)
    assert server.asked == [[], kept]
    assert join(pieces).token_ids.tolist() == [*kept, 21, END]
