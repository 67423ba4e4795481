"""Episodes with images for tests: an environment that shows some, a policy that counts tokens as SGLang does, and rows."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np

from megarl.agents.environment import Done, EpisodeRow, Response, Turn
from megarl.agents.observer import Observer
from megarl.core.types import Prompt, Sample
from megarl.data.image_places import collapsed, spellings
from megarl.data.images import image_of, png
from megarl.data.prompts import MESSAGES_KEY
from megarl.models.vision import png_size
from tests.agents.fake_policy import FakePolicy
from tests.support.sight import seeing_tokenizer, sight_for

TOKENIZER = seeing_tokenizer()
SIGHT = sight_for(TOKENIZER)
OBSERVER = Observer(SIGHT, spellings(TOKENIZER, SIGHT))
[END] = TOKENIZER.convert_tokens_to_ids(["<|im_end|>"])


def row(content: str, *images: bytes, folder: Path = Path(), **fields: Any) -> Prompt:
    """A row of these images, whose own tokens nobody looks at."""
    seen = tuple(image_of(each, folder, "row", SIGHT) for each in images)
    metadata = {**fields, MESSAGES_KEY: [{"role": "user", "content": content}]}
    return Prompt("rows.jsonl:1", np.array([1], np.int32), content, "42", metadata, images=seen)


class Shows:
    """Begins with the row's messages, and shows in each turn what `answers` has for it; then it is done."""

    def __init__(self, answers: list[Any] | None = None, start: Any = None) -> None:
        self._answers, self._start, self.rows = answers or [], start, list[EpisodeRow]()

    async def start(self, row: EpisodeRow) -> Any:
        self.rows.append(row)
        return list(row.messages) if self._start is None else self._start

    async def step(self, response: Response) -> Turn | Done:
        if response.turn >= len(self._answers):
            return Done(1.0)
        return Turn([{"role": "user", "content": self._answers[response.turn]}], 0.25)

    async def close(self) -> None:
        pass


class SeeingPolicy(FakePolicy):
    """Says an `a` each turn, or other tokens. What came with each request is in `seen`: its ids, and its images' files."""

    def __init__(self, turn: list[int] | None = None, **changes: Any) -> None:
        ids = [*TOKENIZER("a")["input_ids"], END] if turn is None else turn
        super().__init__(lambda *_: ids, lambda ids: str(TOKENIZER.decode(ids)), ends={END}, **changes)
        self.seen: list[tuple[list[int], tuple[bytes, ...]]] = []

    def _write(self, body: dict[str, Any]) -> Any:
        files = tuple(base64.b64decode(url.partition(",")[2]) for url in body.get("image_data", ()))
        self.seen.append((body["input_ids"], files))
        answer = super()._write(body)
        more = sum(SIGHT.num_tokens(*png_size(each)) - 1 for each in files)
        return {**answer, "meta_info": {**answer["meta_info"], "prompt_tokens": len(body["input_ids"]) + more}}


def assert_seen(fake: SeeingPolicy, sample: Sample) -> None:
    """Each request had the beginning of the sample, with one token in the place of each run of an image's, and its images."""
    ids = np.concatenate([sample.prompt.token_ids, sample.response_ids])
    beginnings = [collapsed(ids[:end], SIGHT.image_token).tolist() for end in range(1, len(ids) + 1)]
    for asked, files in fake.seen:
        assert asked in beginnings and asked.count(SIGHT.image_token) == len(files)
        assert files == sample.images[: len(files)]


def as_png(data: bytes) -> bytes:
    """What becomes of a file."""
    return png(image_of(data, Path(), "", SIGHT), "")
