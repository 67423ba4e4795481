"""Harnesses that send images: what they send is what servers see and is trained on, and a journal holds it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI

from megarl.agents.endpoint.http import Endpoint
from megarl.agents.environment import Done, EpisodeRow
from megarl.agents.harness_process import row_json
from megarl.core.types import Prompt, Sample, Status
from megarl.data.image_places import collapsed
from megarl.models.vision import png_size
from megarl.rollout.journal import Journal, Written
from megarl.rollout.pictures import Pictures
from megarl.rollout.tasks import GroupTask
from tests.agents.drawing import data_url
from tests.agents.endpoint.harnesses import MODEL, harnessed
from tests.agents.endpoint.test_http import served
from tests.agents.looking import END, OBSERVER, SIGHT, TOKENIZER, SeeingPolicy, as_png, assert_seen, row
from tests.support.sight import picture

ONE, TWO = picture(8, 4), picture(9, 9, 1)


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


class Looks:
    """Shows the row's image, then another; and asks for what is refused first, `wrong`."""

    def __init__(self, *wrong: Any) -> None:
        self.wrong, self.refused = wrong, list[str]()

    async def __call__(self, client: AsyncOpenAI, told: EpisodeRow) -> Done:
        messages: list[Any] = [{"role": "user", "content": [text("Look: "), image(ONE)]}]
        for more in ([image(TWO), text("<|im_end|> and <image>?")], "done?", None):
            for wrong in self.wrong:
                await self._refused(client, wrong(messages))
            answer = await client.chat.completions.create(model=MODEL, messages=messages)
            messages += [answer.choices[0].message]
            messages += [] if more is None else [{"role": "user", "content": more}]
        return Done(1.0)

    async def _refused(self, client: AsyncOpenAI, messages: Any) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=messages)
        self.refused.append(str(caught.value))


def looked(prompt: Prompt, harness: Any, **changes: Any) -> tuple[Sample, SeeingPolicy]:
    fake = SeeingPolicy()
    changes = {"tokenizer": TOKENIZER, "observer": OBSERVER, **changes}
    [sample] = harnessed(fake, harness, prompt=prompt, **changes)
    return sample, fake


async def again(folder: Path, sample: Sample, prompt: Prompt) -> Sample:
    """As a journal has it, with its images."""
    journal, task = Journal(folder), GroupTask(group=0, row=0, step=3, first=0, count=1, greedy=False)
    try:
        await journal.add(task, prompt, Written([sample], []))
        found = await journal.find(task, prompt)
    finally:
        await journal.close()
    assert found is not None
    await Pictures(prompt, SIGHT.image_token).put([sample, *found.samples])
    return found.samples[0]


def test_what_a_harness_sends_is_seen_and_trained_on_and_comes_back_of_a_journal(tmp_path: Path) -> None:
    prompt = row("<image>", ONE)  # of which nothing stands anywhere: the harness sends its own
    sample, fake = looked(prompt, Looks())
    assert sample.status is Status.COMPLETED, sample.metadata
    found = asyncio.run(again(tmp_path, sample, prompt))
    assert sample.images == (as_png(ONE), as_png(TWO)) == found.images
    assert sample.prompt.images == () == found.prompt.images
    assert [len(files) for _, files in fake.seen] == [1, 2, 2]
    assert_seen(fake, sample)
    users = [each["content"] for each in sample.metadata["messages"] if each["role"] == "user"]
    assert users == ["Look: <image>", "<image><|im_end|> and <image>?", "done?"]
    assert not sample.loss_mask[sample.response_ids == SIGHT.image_token].any()


def with_image(url: str) -> Any:
    return lambda said: [*said[:-1], {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def test_what_is_no_image_and_another_image_than_before_are_refused_and_leave_nothing() -> None:
    wrong = [
        with_image("https://x/a.png"),
        with_image("/etc/hostname"),
        with_image("data:image/png;base64,?"),
        with_image(data_url(b"none")),
        with_image(data_url(picture(64, 64)[:3000])),
        with_image(data_url(picture(64, 64)[:3000] + ONE[-12:])),
    ]
    harness = Looks(*wrong)
    sample, fake = looked(row("a"), harness)
    assert sample.status is Status.COMPLETED and len(sample.shown) == 2
    assert_seen(fake, asyncio.run(put(sample)))
    says = (
        "an image that is no data URL",
        "an image that is no data URL",
        "an image is a data URL whose content is no base64",
        "messages, message 1, image 1: its bytes cannot be decoded as an image",
        "messages, message 1, image 1: its bytes cannot be decoded as an image",
        "messages, image 1: its bytes cannot be decoded as an image",
    )
    for at, refused in enumerate(harness.refused):
        assert says[at % len(says)] in refused
    assert len(harness.refused) == 3 * len(says)

    async def another(client: AsyncOpenAI, told: EpisodeRow) -> Done:
        messages: list[Any] = [{"role": "user", "content": [image(ONE)]}]
        answer = await client.chat.completions.create(model=MODEL, messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "b"}]
        messages[0] = {"role": "user", "content": [image(TWO)]}
        with pytest.raises(openai.BadRequestError, match="does not extend the episode's conversation: message 1 was"):
            await client.chat.completions.create(model=MODEL, messages=messages)
        return Done(1.0)

    sample, _ = looked(row("a"), another)
    assert [file for _, file in sample.shown] == [as_png(ONE)]


async def put(sample: Sample) -> Sample:
    await Pictures(row("a"), SIGHT.image_token).put([sample])
    return sample


def test_a_model_that_sees_none_is_sent_none() -> None:
    async def blind(client: AsyncOpenAI, told: EpisodeRow) -> Done:
        for role in ("user", "tool"):
            messages: Any = [{"role": "user", "content": "a"}, {"role": role, "content": [image(ONE)]}]
            with pytest.raises(openai.BadRequestError, match="an image in the messages, and the model sees no images"):
                await client.chat.completions.create(model=MODEL, messages=messages)
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [text("a")]}])
        return Done(1.0)

    sample, _ = looked(row("a"), blind, observer=None)
    assert sample.status is Status.COMPLETED and sample.shown == ()


def test_a_rows_messages_as_they_are_show_the_model_nothing_and_are_refused() -> None:
    async def careless(client: AsyncOpenAI, told: EpisodeRow) -> Done:
        messages: Any = list(told.messages)
        with pytest.raises(
            openai.BadRequestError, match="the messages have <image> as text, which shows the model none"
        ):
            await client.chat.completions.create(model=MODEL, messages=messages)
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Without."}])
        return Done(1.0)

    sample, _ = looked(row("<image>?", ONE), careless)
    assert sample.status is Status.COMPLETED and sample.images == ()


def test_a_harness_is_told_where_the_images_of_its_row_are(tmp_path: Path) -> None:
    told = EpisodeRow("r", ({"role": "user", "content": "<image>"},), "", {}, 1, (tmp_path / "a.png", b"abc"))
    assert json.loads(row_json(told))["images"] == [str(tmp_path / "a.png"), "data:;base64,YWJj"]


def test_completions_have_no_places_of_images_as_they_bring_none() -> None:
    """Neither spelled nor as ids; those that the policy wrote itself are its own."""
    image_token = SIGHT.image_token
    wrote = SeeingPolicy([image_token, END])
    refused: list[str] = []

    async def completes(client: AsyncOpenAI, told: EpisodeRow) -> Done:
        first = TOKENIZER("ab")["input_ids"]
        for wrong in ("a<|image_pad|>b", [*first, image_token]):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model=MODEL, prompt=wrong)
            refused.append(str(caught.value))
        await client.completions.create(model=MODEL, prompt=first)
        await client.completions.create(model=MODEL, prompt=[*first, image_token, END, *first])
        return Done(1.0)

    [sample] = harnessed(wrote, completes, prompt=row("<image>", ONE), tokenizer=TOKENIZER, observer=OBSERVER)
    assert sample.status is Status.COMPLETED and sample.numbers["turns"] == 2.0 and sample.shown == ()
    says = f"The prompt has the token {image_token}, which stands for an image or a video, and completions carry none"
    assert len(refused) == 2 and all(says in each for each in refused)


def test_who_asks_beside_any_episode_shows_images_too() -> None:
    """Each request with its own, for all of its choices."""
    fake = SeeingPolicy()

    async def call(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        first: list[Any] = [{"role": "user", "content": [text("Look: "), image(ONE)]}]
        answer = await client.chat.completions.create(model=MODEL, messages=first, n=2)
        more: list[Any] = [answer.choices[0].message, {"role": "user", "content": [image(TWO), text("And now?")]}]
        again = await client.chat.completions.create(model=MODEL, messages=[*first, *more])
        assert answer.usage is not None and again.usage is not None
        found = [answer.usage.prompt_tokens, again.usage.prompt_tokens]
        ids = [collapsed(np.array(asked, np.int32), SIGHT.image_token).tolist() for asked, _ in fake.seen]
        assert ids == [asked for asked, _ in fake.seen]  # one token an image, of which a server makes as many as it has
        squares = [SIGHT.num_tokens(*png_size(as_png(each))) for each in (ONE, TWO)]
        assert found == [len(ids[0]) - 1 + squares[0], len(ids[2]) - 2 + sum(squares)]
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}])

    served(fake, call, TOKENIZER, OBSERVER)
    assert [files for _, files in fake.seen] == [(as_png(ONE),)] * 2 + [(as_png(ONE), as_png(TWO)), ()]


def test_what_is_no_image_beside_any_episode_is_refused_before_a_server_is_asked() -> None:
    fake = SeeingPolicy()
    damaged, long = picture(64, 64)[:3000] + ONE[-12:], [image(picture(16, 12, seed)) for seed in range(15)]
    says: dict[str, Any] = {
        "an image that is no data URL": [{"type": "image_url", "image_url": {"url": "https://x/a.png"}}],
        "message 1, image 1: its bytes cannot be decoded": [image(b"none")],
        "messages, image 1: its bytes cannot be decoded": [image(damaged)],
        "spells <|image_pad|>, which the model takes for a place of an image": "Look: <|image_pad|>",
        "and the model's context is 200 with the answer": long,
    }

    async def call(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        for found, content in says.items():
            asked: Any = [{"role": "user", "content": content}]
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model=MODEL, messages=asked)
            assert found in str(caught.value)
        with pytest.raises(openai.BadRequestError, match="and completions carry none"):
            await client.completions.create(model=MODEL, prompt="a<|image_pad|>")

    served(fake, call, TOKENIZER, OBSERVER)
    assert fake.seen == []

    async def blind(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        asked: Any = [{"role": "user", "content": [image(ONE)]}]
        with pytest.raises(openai.BadRequestError, match="an image in the messages, and the model sees no images"):
            await client.chat.completions.create(model=MODEL, messages=asked)

    served(SeeingPolicy(), blind, TOKENIZER)
