"""A fake server that writes like a policy: turns of random tokens, cut off now and then, by weights that change."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.support.fake_sglang import FakeSglang, generation

Write = Callable[[list[int], int], list[int]]


class FakePolicy(FakeSglang):
    """write: the tokens of a turn, from the context and what it may have at most. Remembers each request with its answer.

    cut: chance that a request is answered with the beginning of its turn and `abort`. Each request is served by weights one
    version later. Log-probs are unlike any other's.
    """

    def __init__(self, write: Write, decode: Callable[[list[int]], str], *, ends: set[int], cut: float = 0.0) -> None:
        super().__init__(answer=self._write)
        self._writes, self._decode, self._ends, self._cut = write, decode, ends, cut
        self._random = random.Random(7)
        self.version = 0
        self.turns: list[tuple[list[int], list[int], list[float], int, bool]] = []

    def _write(self, body: dict[str, Any]) -> Mapping[str, Any]:  # type: ignore[override]
        context: list[int] = body["input_ids"]
        most = body["sampling_params"]["max_new_tokens"]
        ids = self._writes(context, most)[:most]
        finish = "stop" if ids and ids[-1] in self._ends else "length"
        if self._random.random() < self._cut:
            ids, finish = ids[: self._random.randint(0, len(ids))], "abort"
        self.version += 1
        answer = generation(ids, finish=finish, version=self.version, text=self._decode(ids))
        logprobs = [-self._random.random() for _ in ids]
        answer["meta_info"]["output_token_logprobs"] = [
            [logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)
        ]
        if finish == "stop":
            answer["meta_info"]["finish_reason"]["matched"] = ids[-1]
        answer["meta_info"]["prompt_tokens"] = len(context)
        self.turns.append((context, ids, logprobs, self.version, finish == "abort"))
        return answer

    def with_routing(self, body: dict[str, Any]) -> dict[str, Any]:
        """An answer with the experts of each token, two by its place and by the request's number: for `answer`."""
        answer = dict(self._write(body))
        rows = len(body["input_ids"]) + len(answer["output_ids"]) - 1
        table = np.repeat(np.arange(rows, dtype=np.int32) + 1000 * len(self.turns), 2)
        answer["meta_info"]["routed_experts"] = base64.b64encode(table.tobytes()).decode()
        return answer
