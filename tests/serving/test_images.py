"""Real servers of models that see images: their log-probs beside transformers', however a prompt is computed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from megarl.serving.client import PauseMode, ServerClient
from tests.support.forked_servers import Copies
from tests.support.seeing import CHUNK, Seeing, Shown, seeing
from tests.support.served import NEEDS, begun
from tests.support.vision import QWEN2_5, QWEN3, QWEN3_MOE, Architecture, png

pytestmark = pytest.mark.needs(*NEEDS)
CLOSE = 1e-5  # nats


def image(seen: Seeing, columns: int, rows: int, seed: int = 0) -> bytes:
    """A PNG file of so many squares."""
    square = seen.reference.vision.square
    return png(columns * square, rows * square, seed)


def prompts(seen: Seeing) -> dict[str, Shown]:
    """By what is special about each."""
    words = list(range(10, 60))
    parts: dict[str, list[list[int] | bytes]] = {
        "one": [words[:5], image(seen, 3, 2), words[5:9]],
        "several": [words[:4], image(seen, 2, 2, 1), words[4:7], image(seen, 4, 3, 2), words[7:20]],
        "side by side": [words[:4], image(seen, 2, 2, 3), image(seen, 2, 3, 4), words[4:9]],
        "at the beginning": [image(seen, 2, 3, 5), words[:6]],
        "larger than the processor says": [words[:4], image(seen, 7, 5, 6), words[4:9]],
        "smaller than the processor says": [words[:4], image(seen, 1, 1, 7), words[4:9]],
        "none": [words[:30]],
    }
    return {what: seen.reference.shown(*each) for what, each in parts.items()}


def check(seen: Seeing) -> None:
    """Log-probs of all prompts, in the places of their words, are those of transformers."""

    async def go() -> None:
        async with ServerClient(seen.endpoint) as client:
            for what, shown in prompts(seen).items():
                answer = await seen.ask(client, shown, first=0)
                told = answer["meta_info"]
                assert told["prompt_tokens"] == len(shown.ids), what
                labels = np.array(shown.ids[1:])
                text = labels != seen.reference.vision.image_token
                found = told["input_token_logprobs"][1:]
                # In the place of an image's tokens SGLang has what tells images apart.
                assert np.array([token for _, token, _ in found])[text].tolist() == labels[text].tolist(), what
                expected = seen.reference.logprobs(shown.ids, shown.images)
                off = np.abs(np.array([logprob for logprob, _, _ in found]) - expected)
                assert off[text].max() < CLOSE, what

    assert max(len(shown.ids) for shown in prompts(seen).values()) > 2 * CHUNK
    asyncio.run(go())


def test_log_probs_of_prompts_with_images_are_those_of_transformers(seen: Seeing) -> None:
    check(seen)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [QWEN2_5, QWEN3, QWEN3_MOE])
def test_so_are_those_of_a_server_of_two_ranks(architecture: Architecture, copies: Copies, tmp_path: Path) -> None:
    with seeing(copies, tmp_path, architecture, tp=2) as found:
        check(found)


def test_prefixes_are_shared_with_the_same_image_alone(seen: Seeing) -> None:
    words = list(range(60, 78))
    ours, other = (seen.reference.shown(words[:3], image(seen, 3, 3, seed), words[3:]) for seed in (20, 21))

    async def go() -> list[int]:
        cached = []
        async with ServerClient(seen.endpoint) as client:
            for shown in (ours, other, ours, other):
                answer = await seen.ask(client, shown, 6)
                assert seen.off(shown, answer) < CLOSE
                cached.append(answer["meta_info"]["cached_tokens"])
        return cached

    before_image = 4  # three words, and what begins an image
    length = len(ours.ids) - 1
    assert ours.sent == other.sent
    assert asyncio.run(go()) == [0, before_image, length, length]


def test_requests_of_one_batch_see_their_own_images(seen: Seeing) -> None:
    words = list(range(30, 40))
    asked = [
        seen.reference.shown(words[: 2 + index % 3], image(seen, 1 + index % 4, 2, 40 + index // 2), words[5:])
        for index in range(8)
    ]

    async def go() -> None:
        async with ServerClient(seen.endpoint) as client:
            answers = await asyncio.gather(*(seen.ask(client, shown, 8) for shown in asked))
        assert [seen.off(shown, answer) < CLOSE for shown, answer in zip(asked, answers, strict=True)] == [True] * 8

    asyncio.run(go())


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_request_that_was_taken_back_or_held_goes_on_with_its_image(seen: Seeing, mode: PauseMode) -> None:
    shown = seen.reference.shown([11, 12], image(seen, 4, 3, 80), [13, 14])

    async def go() -> None:
        async with ServerClient(seen.endpoint) as client:
            running = await begun(client, lambda: seen.ask(client, shown, 120))
            await client.pause(mode)
            await client.resume()
            assert seen.off(shown, await running) < CLOSE

    asyncio.run(go())
