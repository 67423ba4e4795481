"""What answers in a run without servers and graders: responses that follow from their prompts, and grades from these."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from megarl.core.types import VersionSpan
from megarl.recipe.reward import Code
from megarl.rewards.grade import Grade, Item, failed
from megarl.serving.answers import Generation
from megarl.serving.client import ServerEndpoint
from megarl.serving.prompt_scores import PromptScores
from megarl.serving.sampling import Sampling
from tests.support.dry.actors import Book

END, LETTERS, VOCAB = 2, 20, 60


class Client:
    """In the place of a client of router or server: responses out of the prompt and how often it was asked, a token at a time."""

    endpoint = ServerEndpoint("dry", "http://dry", "")

    def __init__(self, book: Book, endpoint: ServerEndpoint | None = None) -> None:
        self._book, self.endpoint = book, endpoint or self.endpoint

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def generate(self, token_ids: Any, sampling: Sampling, deadline_s: float, **_: object) -> Generation:
        """A response whose log-probs and end follow from its tokens. Each token is of the weights that are there by then."""
        book, ids = self._book, np.asarray(token_ids)
        book.in_flight += 1
        book.note("generate", tuple(ids.tolist()), str(sampling.body()), sampling.routing, deadline_s, book.in_flight)
        seed = int(np.sum(ids)) * 7 + (self._drawn(ids, sampling) if sampling.temperature else 0) * 5
        length = 1 + seed % sampling.max_tokens
        versions = await self._versions(length)
        book.in_flight -= 1
        finish = "stop" if seed % 3 else "length"
        if len(versions) < length:
            finish, length = "abort", len(versions)
        tokens = np.array([LETTERS + (seed + 3 * at) % VOCAB for at in range(length)], np.int64)
        if finish == "stop":
            tokens[-1] = END
        return Generation(
            token_ids=tokens,
            logprobs=(-1.5 + np.sin(seed + np.arange(length))).astype(np.float32),
            text=f"{seed % 4}",
            finish=finish,
            versions=_spans(versions),
            prompt_tokens=len(ids),
            cached_tokens=0,
            routing=np.zeros((len(ids) + length - 1, 6), np.int16) if sampling.routing else None,
        )

    def _drawn(self, ids: Any, sampling: Sampling) -> int:
        """What tells responses to a prompt apart: how often it was asked before."""
        self._book.asked[ids.tobytes()] += 1
        return self._book.asked[ids.tobytes()] - 1

    async def prompt_scores(
        self, token_ids: Any, deadline_s: float, *, first: int, top: int = 0, alone: bool = False
    ) -> PromptScores:
        """What a teacher says of given tokens, which follows from these."""
        book, ids = self._book, np.asarray(token_ids)
        book.in_flight += 1
        book.note("scores", self.endpoint.url, tuple(ids.tolist()), first, top, alone, deadline_s, book.in_flight)
        for _ in range(4):
            await asyncio.sleep(0)
        book.in_flight -= 1
        at = np.arange(first, len(ids))
        likely = (ids[first:, None] + np.arange(top)) % VOCAB
        values = np.log(np.full((len(at), top), 0.5) ** np.arange(1, top + 1))
        return PromptScores(
            (-1.0 + np.cos(ids[first:] + at)).astype(np.float32), likely.astype(np.int32), values.astype(np.float32)
        )

    async def _versions(self, length: int) -> list[int]:
        """The version of each token; fewer tokens where the request is cut off."""
        cuts, versions = self._book.cuts, []
        while len(versions) < length and self._book.cuts == cuts:
            await asyncio.sleep(0)
            if not self._book.paused:
                versions.append(self._book.version)
        return versions

    async def abort(self, deadline_s: float) -> None:
        """Cut off all that runs."""
        self._book.note("abort", self._book.in_flight, deadline_s)
        self._book.cuts += 1

    async def ask(self, path: str, body: Mapping[str, Any] | None = None, deadline_s: float = 0.0) -> Any:
        """The only server, and two calls of the first tool in every third text."""
        if path == "/workers":
            return {"workers": [{"url": self.endpoint.url}]}
        if path != "/parse_function_call" or body is None:
            return {}
        self._book.note("parse", body["tool_call_parser"], body["text"])
        calls = [{"name": body["tools"][0]["function"]["name"], "parameters": "{}"}] * 2
        return {"normal_text": body["text"], "calls": calls if len(body["text"]) % 3 == 0 else []}

    async def close(self) -> None:
        return None


def _spans(versions: list[int]) -> tuple[VersionSpan, ...]:
    starts = [at for at, version in enumerate(versions) if at == 0 or versions[at - 1] != version]
    ends = [*starts[1:], len(versions)]
    return tuple(VersionSpan(versions[start], start, end) for start, end in zip(starts, ends, strict=True))


class Pool:
    """In the place of the processes of a rule."""

    def __init__(self, book: Book, fn: str, workers: int, timeout_s: float, *, key: str) -> None:
        self._fn = fn
        book.note("rule", fn, workers, timeout_s)

    async def start(self) -> None:
        return None

    async def grade(self, item: Item) -> Grade:
        """Two functions differ, and a response's score depends on it, but for prompts that all answer equally badly.

        Some responses to one prompt get no grade.
        """
        prompt, response, answer = item.prompt, item.response, str(item.answer)
        said = int(response) if response.isdigit() else len(response)  # what episodes say is a text
        if answer in ("6", "1009") and said == 1:
            return failed("error: ValueError: no grade for this one")
        if sum(map(ord, answer)) % 3 == 0:
            return Grade(0.25)
        return Grade(((len(prompt) + len(answer) + said) % 4 + len(self._fn) % 3) / 4)

    def oldest(self) -> None:
        return None

    async def close(self) -> None:
        return None


class Tests(Pool):
    """In the place of what runs a row's tests in sandboxes."""

    def __init__(self, book: Book, settings: Code) -> None:
        super().__init__(book, "code", 1, settings.timeout_s, key="")
        book.note("code", settings.model_dump(exclude={"weight"}))


class Poster:
    """In the place of what posts to remote graders and judges."""

    def __init__(self, book: Book, url: str, key: str | None, *, timeout_s: float, **keys: Any) -> None:
        self.url, self._book, self._in_flight, self.well_since = url, book, 0, -math.inf
        book.note("poster", url, key, timeout_s, keys["retries"], keys["retry_for_s"])

    async def post(self, body: dict[str, Any], *, probes: bool = False) -> Any:
        """A judge's reply, or a number for each item."""
        self._in_flight += 1
        self._book.note("post", self.url, str(body), self._in_flight)
        for _ in range(12):  # longer than most responses take
            await asyncio.sleep(0)
        self._in_flight -= 1
        if "input_ids" in body:
            return {"embedding": [sum(body["input_ids"]) % 7 / 400, len(body["input_ids"]) / 1600]}
        if "items" in body:
            return {"rewards": [int(item["response"]) / 2 for item in body["items"]]}
        return {"choices": [{"message": {"content": f'mark 5, or {{"points": {len(str(body)) % 5}}}\nScore: 4'}}]}

    async def close(self) -> None:
        return None
