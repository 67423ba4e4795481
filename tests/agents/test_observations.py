"""Episodes with images: the row's and those of environments and tools, in tokens, at the servers and in samples."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from megarl.agents import observations, observer
from megarl.agents.environment import EnvironmentFailedError
from megarl.agents.environment_processes import EnvironmentProcesses
from megarl.agents.observations import as_parts, sendable, sendable_answer, sendable_parts
from megarl.agents.observer import Observer
from megarl.agents.template import ChatTemplate
from megarl.agents.tool_use import ToolUse
from megarl.agents.tools import Tool, Toolbox, as_content
from megarl.core.types import Image, Prompt, Sample, Status
from megarl.data.images import png
from megarl.recipe.agent import Agent
from megarl.rollout import pictures
from megarl.rollout.pictures import Pictures
from megarl.serving.sampling import Sampling
from tests.agents.drawing import Draws, data_url, part, text
from tests.agents.looking import (
    END,
    OBSERVER,
    SIGHT,
    TOKENIZER,
    SeeingPolicy,
    Shows,
    as_png,
    assert_seen,
    row,
)
from tests.agents.playing import make_settings, play
from tests.agents.test_tokens import assert_exact
from tests.agents.test_tools import FakeReader
from tests.rollout.test_collector import make_recipe
from tests.support.sight import MARKS, TEMPLATE, picture, seeing_tokenizer
from tests.support.tiny import write_tiny_qwen

ONE, TWO, THREE = picture(8, 4), picture(9, 9, 1), picture(4, 8, 2)  # two tokens, four, two


def played(
    prompt: Prompt, make: Callable[[], Any], fake: SeeingPolicy | None = None, **changes: Any
) -> tuple[Sample, SeeingPolicy]:
    fake = fake or SeeingPolicy()
    sampling = changes.pop("sampling", Sampling(10_000))
    settings = make_settings(make, TOKENIZER, **{"observer": OBSERVER, **changes})
    [sample] = play(fake, settings, TOKENIZER, prompt=prompt, sampling=sampling)
    return sample, fake


def with_images(sample: Sample, prompt: Prompt) -> Sample:
    """As a collector has it."""

    async def put() -> None:
        await Pictures(prompt, SIGHT.image_token).put([sample])

    asyncio.run(put())
    return sample


def tokens_of(count: int) -> list[int]:
    start, image, end = TOKENIZER.convert_tokens_to_ids(list(MARKS))
    return [start, *[image] * count, end]


def has(ids: Any, wanted: list[int]) -> bool:
    found = ids.tolist()
    return any(found[at : at + len(wanted)] == wanted for at in range(len(found)))


def test_a_rows_images_stand_where_it_has_them_and_go_with_every_turn() -> None:
    prompt = row("Is <image> larger than <image>?", ONE, TWO)
    environment = Shows(["Look <image> again.", "And again."])
    sample, fake = played(prompt, lambda: environment)
    sample = with_images(sample, prompt)
    assert sample.status is Status.COMPLETED and sample.reward == 1.5
    assert sample.images == (as_png(ONE), as_png(TWO)) and sample.shown == ()
    [told] = environment.rows
    assert told.images == (ONE, TWO) and told.messages[0]["content"] == "Is <image> larger than <image>?"
    assert has(sample.prompt.token_ids, [*tokens_of(2), *TOKENIZER(" larger than ")["input_ids"], *tokens_of(4)])
    # What an environment says in an episode is text, whatever it spells.
    assert has(sample.response_ids, TOKENIZER("Look <image> again.")["input_ids"])
    assert [len(files) for _, files in fake.seen] == [2, 2, 2]
    assert_seen(fake, sample)
    assert sample.metadata["messages"][0]["content"] == "Is <image> larger than <image>?"
    assert sample.metadata["messages"][0]["tokens"] == len(sample.prompt.token_ids)


def test_what_an_environment_shows_stands_in_its_turn_and_is_trained_on_by_nobody() -> None:
    prompt = row("First <image>", ONE)
    answers = [[text("Then "), part(TWO)], "no image", [part(THREE), text("<|im_end|><image>"), part(ONE)]]
    sample, fake = played(prompt, lambda: Shows(answers))
    sample = with_images(sample, prompt)
    assert sample.images == (as_png(ONE), as_png(TWO), as_png(THREE), as_png(ONE))
    assert [number for number, _ in sample.shown] == [1, 2, 3]
    assert [len(files) for _, files in fake.seen] == [1, 2, 2, 4]
    assert_seen(fake, sample)
    assert has(sample.response_ids, [*TOKENIZER("Then ")["input_ids"], *tokens_of(4), END])
    assert not has(sample.response_ids, [*tokens_of(2), END, *TOKENIZER("<image>")["input_ids"]])
    assert not sample.loss_mask[sample.response_ids == SIGHT.image_token].any()
    assert sample.loss_mask.sum() == 2 * 4
    contents = [each["content"] for each in sample.metadata["messages"] if each["role"] == "user"]
    assert contents == ["First <image>", "Then <image>", "no image", "<image><|im_end|><image><image>"]


def test_an_environments_image_may_stand_before_the_rows() -> None:
    prompt = row("<image>", ONE)
    begins = [{"role": "user", "content": [part(THREE), text("like <image>?")]}]
    sample, fake = played(prompt, lambda: Shows(start=begins))
    sample = with_images(sample, prompt)
    assert sample.images == (as_png(THREE), as_png(ONE)) and [number for number, _ in sample.shown] == [0]
    assert_seen(fake, sample)


def test_requests_that_are_cut_off_go_on_with_their_images() -> None:
    prompt = row("<image>?", ONE)
    sample, fake = played(prompt, lambda: Shows([[part(TWO)]] * 6), SeeingPolicy(cut=0.3))
    assert len(fake.seen) > 7
    assert_seen(fake, with_images(sample, prompt))


def test_the_same_image_is_one_object_in_all_episodes_of_a_group() -> None:
    prompt = row("<image>", ONE)
    shared = Pictures(prompt, SIGHT.image_token)
    fake, settings = SeeingPolicy(), make_settings(lambda: Shows([[part(bytes(TWO))]]), TOKENIZER, observer=OBSERVER)
    samples = play(fake, settings, TOKENIZER, prompt=prompt, indices=range(3), pictures=shared)
    assert len({id(image) for sample in samples for _, image in sample.shown}) == 1


def pillow(data: bytes, mode: str = "RGB") -> Pillow.Image:
    return Pillow.open(io.BytesIO(data)).convert(mode)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "CMYK", "P"])
def test_an_image_of_pil_is_what_its_file_would_be(mode: str) -> None:
    [message] = sendable([{"role": "user", "content": [part(pillow(TWO, mode))]}])
    [sent] = message["content"]
    assert as_png(sent["image"]) == as_png(_saved(pillow(TWO, mode).convert("RGB")))


def _saved(image: Pillow.Image) -> bytes:
    written = io.BytesIO()
    image.save(written, "PNG")
    return written.getvalue()


def test_images_are_given_as_bytes_paths_data_urls_or_pil(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(ONE)
    given = [
        part(ONE),
        part(bytearray(ONE)),
        part(tmp_path / "a.png"),
        part(str(tmp_path / "a.png")),
        part(data_url(ONE)),
        {"type": "image_url", "image_url": {"url": data_url(ONE)}},
        {"type": "image_url", "image_url": data_url(ONE)},
        {"type": "image_url", "image_url": {"url": str(tmp_path / "a.png"), "detail": "low"}},
    ]
    [message] = sendable([{"role": "user", "content": [*given, text("a"), {"type": "image"}]}])
    assert message["content"] == [part(ONE)] * len(given) + [text("a"), {"type": "image"}]
    # What has no images stays as it is.
    assert sendable_answer([{"role": "user", "content": "a"}]) == [{"role": "user", "content": "a"}]
    assert [sendable_answer(each) for each in (5, None, [1], [{}])] == [5, None, [1], [{}]]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"type": "video", "video": "a"}, "a part of a message is {'type': 'video', 'video': 'a'}; wanted are"),
        (part("https://x/a.png"), "an image is the address https://x/a.png, and none is fetched"),
        (part("none.png"), "an image is the path none.png, and there is no such file"),
        (part("/dev/zero"), "an image is the path /dev/zero, and there is no such file"),
        (part("data:image/png;base64,?"), "an image is a data URL whose content is no base64"),
        (part(5), "an image is 5; wanted are"),
        (part(None), "an image is None; wanted are"),
        (part(ONE + b"x" * 4096), f"an image has {len(ONE) + 4096} bytes, and 4096 at most are taken"),
        (text(5), "a part of a message is"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_image_costs_its_episode_which_says_why(
    monkeypatch: pytest.MonkeyPatch, given: Any, says: str
) -> None:
    monkeypatch.setattr(observations, "MOST_BYTES", 4096)
    sample, _ = played(row("a"), lambda: Shows([[given]]))
    assert sample.status is Status.FAILED
    assert f"the environment failed: step: {says}" in sample.metadata["failure"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([part(b"no image")], "step, message 1, image 1: its bytes cannot be decoded as an image"),
        ([part(ONE), part(ONE[:60])], "step, message 1, image 2: its bytes cannot be decoded as an image"),
        ([part(ONE), part(ONE[:60] + ONE[-12:])], "step, image 2: its bytes cannot be decoded as an image"),
        ([part(picture(900, 4))], "step, message 1, image 1: 900 x 4 pixels: the longer side is more than 200 times"),
        ([part(picture(40, 30))], "step, message 1, image 1: 40 x 30 pixels are over the bound of 1000"),
        # Nothing is decoded to find that out, of one that does not end as whole ones do either.
        ([part(picture(40, 30)[:-9])], "step, message 1, image 1: 40 x 30 pixels are over the bound of 1000"),
        ([{"type": "image"}], 'step gave a part {"type": "image"} without an image'),
        ([], "step gave as message 1"),
    ],
)
def test_images_that_cannot_be_shown_cost_their_episode(
    monkeypatch: pytest.MonkeyPatch, content: Any, says: str
) -> None:
    monkeypatch.setattr(observer, "MOST_PIXELS", 1000 if "bound" in says else 2**20)
    sample, _ = played(row("a"), lambda: Shows([content]))
    assert sample.status is Status.FAILED and says in sample.metadata["failure"]


@pytest.mark.parametrize(
    ("begins", "says"),
    [
        ("Hm.", "start gave messages with 0 places of the row's images (<image>, or parts"),
        ("<image> <image>", "start gave messages with 2 places of the row's images"),
        ([{"type": "image"}, text("<image>")], "start gave messages with 2 places"),
        ("<image> <|vision_end|>", "start gave text that spells <|vision_end|>"),
    ],
)
def test_first_messages_have_a_place_for_each_of_the_rows_images(begins: Any, says: str) -> None:
    sample, _ = played(row("<image>", ONE), lambda: Shows(start=[{"role": "user", "content": begins}]))
    assert sample.status is Status.FAILED and says in sample.metadata["failure"]


def test_images_count_in_the_budget_and_are_not_decoded_where_they_have_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded: list[str] = []

    def counted(image: Image, where: str) -> bytes:
        decoded.append(where)
        return png(image, where)

    monkeypatch.setattr(pictures, "png", counted)
    whole, _ = played(row("a"), lambda: Shows([[part(TWO)]]))
    assert decoded == ["step, image 1"]
    # All but the last turn's two tokens, and one less: then the policy could write nothing behind the image.
    for left, over in ((-1, 1.0), (0, 1.0)):
        sample, _ = played(
            row("a"), lambda: Shows([[part(TWO)]]), sampling=Sampling(len(whole.response_ids) - 2 + left)
        )
        assert sample.numbers["truncated_by/tokens"] == over and sample.shown == ()
    assert len(decoded) == 1
    sample, _ = played(row("a"), lambda: Shows([[part(TWO)]]), max_prompt_tokens=3)
    assert "over data.max_prompt_tokens=3" in sample.metadata["failure"]
    sample, _ = played(row("<image>", TWO), lambda: Shows(), max_prompt_tokens=len(whole.prompt.token_ids) + 4)
    assert f"start gave messages of {len(whole.prompt.token_ids) + 5} tokens" in sample.metadata["failure"]


@pytest.mark.parametrize("blind", [Observer(), Observer(SIGHT, (), "agent.rewritten: split shows none")])
def test_a_policy_that_sees_none_is_shown_none(blind: Observer) -> None:
    sample, _ = played(row("a"), lambda: Shows([[text("b"), part(ONE)]]), observer=blind)
    assert "step, message 1: there is an image in it, and " in sample.metadata["failure"]
    sample, _ = played(row("a"), lambda: Shows([[text("b"), text("c")]]), observer=blind)
    assert sample.status is Status.COMPLETED and has(sample.response_ids, TOKENIZER("bc")["input_ids"])


def test_who_sees_none_beside_the_policy_is_known_from_the_recipe(tmp_path: Path) -> None:
    served = {"servers": {"urls": ["http://127.0.0.1:1"]}}
    own = write_tiny_qwen(tmp_path / "text")
    game = {"environment": "guess_number"}
    for changed, says in (
        ({}, ""),
        ({"teacher": served}, "a teacher behind an address (teacher.servers) is asked about text alone"),
        ({"teacher": {"path": own}}, f"teacher.path {own} is a model that sees none"),
        ({"agent": game | {"rewritten": "split"}}, "with agent.rewritten: split none is shown"),
    ):
        recipe = make_recipe(tmp_path, **{"agent": game, **changed})
        assert Observer.open(recipe, TOKENIZER, SIGHT).blind == says
    assert Observer.open(recipe, TOKENIZER, None).blind == "the model sees no images"


def test_an_episode_does_not_go_on_behind_an_image_token_that_the_policy_wrote() -> None:
    """A server would take it for the place of an image, and a rank for one of the next image's."""
    written = [SIGHT.image_token, END]
    for answer, ended in (([part(ONE)], Status.FAILED), ("b", Status.FAILED)):
        sample, _ = played(row("<image>", ONE), lambda answer=answer: Shows([answer]), SeeingPolicy(written))
        assert sample.status is ended and "which the policy wrote" in sample.metadata["failure"]
    sample, _ = played(row("<image>", ONE), lambda: Shows(), SeeingPolicy(written))
    assert sample.status is Status.COMPLETED


def multiply(left: int) -> Any:
    """Gives an image, or what is none."""
    return [pillow(TWO), [text("both "), part(ONE)], [text("x"), part(b"damaged")], [{"type": "image", "id": 3}]][left]


class Calls(SeeingPolicy):
    """Calls the tool with 0 to 3 by turns, and then says `a`."""

    def __init__(self) -> None:
        super().__init__()
        turns = iter(["0", "1", "2", "3", "a"])
        self._writes = lambda *_: [*TOKENIZER(next(turns))["input_ids"], END]


def told_by_tools(seeing: Observer, most: int | None = None) -> tuple[list[Any], Sample]:
    tools = ToolUse(Toolbox([Tool(multiply)], 9.0, most_characters=most), FakeReader())
    sample, fake = played(row("a"), lambda: Shows(), Calls(), tools=tools, observer=seeing)
    assert sample.status is Status.COMPLETED, sample.metadata
    if seeing is OBSERVER:
        assert_seen(fake, with_images(sample, row("a")))
    return [each["content"] for each in sample.metadata["messages"] if each["role"] == "tool"], sample


def test_tools_show_images_and_the_policy_is_told_of_those_that_are_damaged() -> None:
    told, sample = told_by_tools(OBSERVER)
    assert told[:2] == ["<image>", "both <image>"]
    assert told[2].startswith("error: multiply, message 1, image 1: its bytes cannot be decoded as an image")
    assert told[3] == '[{"type":"image","id":3}]'
    assert [image for _, image in sample.shown] == [as_png(TWO), as_png(ONE)]
    assert sample.numbers["tool_failures"] == 1.0
    told, sample = told_by_tools(OBSERVER, most=2)
    assert (
        told[1].startswith("b") and told[1].endswith("left out]\n <image>") and sample.numbers["tool_results_cut"] > 0
    )
    told, _ = told_by_tools(Observer())
    assert told == ["[image]", "both [image]", "x[image]", '[{"type":"image","id":3}]']


def test_a_tools_json_that_speaks_of_images_stays_json() -> None:
    assert as_parts([{"type": "image", "src": "a"}]) is None
    assert as_parts([{"type": "image_url", "image_url": data_url(ONE)}, 5]) is None
    assert as_parts({"type": "image", "image": ONE}) is None and as_parts([]) is None and as_parts("a") is None


def test_images_of_pil_among_a_tools_texts_are_shown_and_within_its_json_are_refused() -> None:
    """Of an image JSON would tell the policy where it lies in memory."""
    image = Pillow.open(io.BytesIO(ONE))
    for given in ([image, "b"], (image, text("b"))):
        content = as_content(given)
        assert [each["type"] for each in content] == ["image", "text"] and content[1] == text("b")
        assert as_png(content[0]["image"]) == as_png(ONE)
    with pytest.raises(ValueError, match="there is an image of PIL within what it gave; wanted are parts"):
        as_content({"shown": image})
    with pytest.raises(ValueError, match="there is an image of PIL within what it gave"):
        as_content([image, 5])
    assert as_content({"at": Path("a")}) == '{"at":"a"}'


def test_what_a_coroutine_gives_is_written_to_a_file_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes a second for an image of 14 million pixels, in which no other episode would go on."""
    image, threads = Pillow.open(io.BytesIO(ONE)), []

    async def look() -> Any:
        return image

    def looked() -> Any:
        return look()

    def noted(given: Any) -> Any:
        threads.append(threading.current_thread())
        return sendable_parts(given)

    monkeypatch.setattr(observations, "sendable_parts", noted)
    for function in (look, looked):
        assert asyncio.run(Tool(function).call("{}", 9.0))[0]["type"] == "image"
    assert len(threads) == 2 and threading.main_thread() not in threads


def played_apart(folder: Path, wrong: str = "") -> tuple[Sample, SeeingPolicy]:
    named = {"environment": "tests.agents.drawing:Draws", "settings": {"folder": str(folder), "wrong": wrong}}
    processes = EnvironmentProcesses(Agent(**named, workers=1))  # type: ignore[arg-type]
    return played(row("a"), lambda: Draws(str(folder)), processes=processes)


def test_an_environment_in_a_process_of_its_own_shows_the_same(tmp_path: Path) -> None:
    theirs, fake = played_apart(tmp_path)
    assert theirs.status is Status.COMPLETED, theirs.metadata
    own, _ = played(row("a"), lambda: Draws(str(tmp_path)))
    assert theirs.shown == own.shown and len(own.shown) == 3
    assert np.array_equal(theirs.response_ids, own.response_ids)
    assert_seen(fake, with_images(theirs, row("a")))
    failed, _ = played_apart(tmp_path, "path")
    assert "none.png, and there is no such file" in failed.metadata["failure"]


def test_what_comes_of_a_process_is_not_opened_as_a_path_here() -> None:
    """Its process makes bytes of images; whatever else comes from there is nothing to read."""
    for given, says in (("/etc/hostname", "an image came as str"), (b"x" * 5000, "5000 bytes, and 4096")):
        before, observations.MOST_BYTES = observations.MOST_BYTES, 4096
        try:
            with pytest.raises(EnvironmentFailedError, match=says):
                OBSERVER.later([{"role": "user", "content": [part(given)]}])
        finally:
            observations.MOST_BYTES = before
    with pytest.raises(EnvironmentFailedError, match="a part of it is"):
        OBSERVER.later([{"role": "user", "content": [{"type": "image_url", "image_url": "/etc/hostname"}]}])


def test_a_template_that_leaves_images_out_fails_the_episode() -> None:
    marks = "".join(MARKS)
    assert marks in TEMPLATE
    silent = ChatTemplate(seeing_tokenizer(TEMPLATE.replace(marks, "{{ part['text'] }}")))
    sample, _ = played(row("a"), lambda: Shows([[part(ONE)]]), template=silent)
    assert "does not write each as start, image and end token" in sample.metadata["failure"]


def test_token_ids_are_those_of_the_requests() -> None:
    prompt = row("<image>", ONE)
    sample, fake = played(prompt, lambda: Shows(["b"]))
    fake.turns = [(expanded(context), *rest) for context, *rest in fake.turns]  # type: ignore[misc]
    assert_exact(sample, fake)


def expanded(context: list[int]) -> list[int]:
    return [token for each in context for token in ([each] * 2 if each == SIGHT.image_token else [each])]
