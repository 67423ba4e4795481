"""Real servers of models that see images: their log-probs beside transformers', however a prompt is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from megarl.serving.client import PauseMode, ServerClient
from tests.support.forked_servers import Copies
from tests.support.seeing import CHUNK, Seeing, Shown, seeing
from tests.support.served import NEEDS, begun
from tests.support.vision import QWEN2_5, QWEN3, png

pytestmark = pytest.mark.needs(*NEEDS)
CLOSE = 1e-5  # nats


@pytest.fixture(scope="module", params=[QWEN2_5, QWEN3])
def served(
    request: pytest.FixtureRequest, copies: Copies, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Seeing]:
    """One server of each architecture."""
    with seeing(copies, tmp_path_factory.mktemp("seeing"), request.param) as found:
        yield found


def image(served: Seeing, columns: int, rows: int, seed: int = 0) -> bytes:
    """A PNG file of so many squares."""
    square = served.reference.vision.square
    return png(columns * square, rows * square, seed)


def prompts(served: Seeing) -> dict[str, Shown]:
    """By what is special about each."""
    words = list(range(10, 60))
    parts: dict[str, list[list[int] | bytes]] = {
        "one": [words[:5], image(served, 3, 2), words[5:9]],
        "several": [words[:4], image(served, 2, 2, 1), words[4:7], image(served, 4, 3, 2), words[7:20]],
        "side by side": [words[:4], image(served, 2, 2, 3), image(served, 2, 3, 4), words[4:9]],
        "at the beginning": [image(served, 2, 3, 5), words[:6]],
        "larger than the processor says": [words[:4], image(served, 7, 5, 6), words[4:9]],
        "smaller than the processor says": [words[:4], image(served, 1, 1, 7), words[4:9]],
        "none": [words[:30]],
    }
    return {what: served.reference.shown(*each) for what, each in parts.items()}


def test_log_probs_of_prompts_with_images_are_those_of_transformers(served: Seeing) -> None:
    async def go() -> None:
        async with ServerClient(served.endpoint) as client:
            for what, shown in prompts(served).items():
                answer = await served.ask(client, shown, first=0)
                told = answer["meta_info"]
                assert told["prompt_tokens"] == len(shown.ids), what
                labels = np.array(shown.ids[1:])
                text = labels != served.reference.vision.image_token
                found = told["input_token_logprobs"][1:]
                # In the place of an image's tokens SGLang has what tells images apart.
                assert np.array([token for _, token, _ in found])[text].tolist() == labels[text].tolist(), what
                expected = served.reference.logprobs(shown.ids, shown.images)
                off = np.abs(np.array([logprob for logprob, _, _ in found]) - expected)
                assert off[text].max() < CLOSE, what

    assert max(len(shown.ids) for shown in prompts(served).values()) > 2 * CHUNK
    asyncio.run(go())


def test_prefixes_are_shared_with_the_same_image_alone(served: Seeing) -> None:
    words = list(range(60, 78))
    ours, other = (served.reference.shown(words[:3], image(served, 3, 3, seed), words[3:]) for seed in (20, 21))

    async def go() -> list[int]:
        cached = []
        async with ServerClient(served.endpoint) as client:
            for shown in (ours, other, ours, other):
                answer = await served.ask(client, shown, 6)
                assert served.off(shown, answer) < CLOSE
                cached.append(answer["meta_info"]["cached_tokens"])
        return cached

    before_image = 4  # three words, and what begins an image
    length = len(ours.ids) - 1
    assert ours.sent == other.sent
    assert asyncio.run(go()) == [0, before_image, length, length]


def test_requests_of_one_batch_see_their_own_images(served: Seeing) -> None:
    words = list(range(30, 40))
    asked = [
        served.reference.shown(words[: 2 + index % 3], image(served, 1 + index % 4, 2, 40 + index // 2), words[5:])
        for index in range(8)
    ]

    async def go() -> None:
        async with ServerClient(served.endpoint) as client:
            answers = await asyncio.gather(*(served.ask(client, shown, 8) for shown in asked))
        assert [served.off(shown, answer) < CLOSE for shown, answer in zip(asked, answers, strict=True)] == [True] * 8

    asyncio.run(go())


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_request_that_was_taken_back_or_held_goes_on_with_its_image(served: Seeing, mode: PauseMode) -> None:
    shown = served.reference.shown([11, 12], image(served, 4, 3, 80), [13, 14])

    async def go() -> None:
        async with ServerClient(served.endpoint) as client:
            running = await begun(client, lambda: served.ask(client, shown, 120))
            await client.pause(mode)
            await client.resume()
            assert served.off(shown, await running) < CLOSE

    asyncio.run(go())
