"""Images of prompts on their way: to servers, into samples and blocks, through the journal, and where one cannot be read."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from megarl.core.errors import MegarlError, UserError
from megarl.core.types import Block, Image, Prompt, Shard
from megarl.data.images import png, pngs
from megarl.data.prompts import PromptSet
from megarl.rewards.combine import Graders
from megarl.rollout import pictures as module
from megarl.rollout.asking import Request, RequestFailedError
from megarl.rollout.collector import Collector
from megarl.rollout.journal import JOURNAL
from megarl.rollout.journal_rows import prompt_crc
from megarl.rollout.pictures import Pictures
from megarl.rollout.probe import Probe
from megarl.serving.client import ServerClient
from megarl.serving.sampling import Sampling
from tests.models.configs import PLAIN
from tests.rollout.samples import make_prompt
from tests.rollout.test_collector import make_recipe
from tests.support.fake_sglang import END, FakeSglang, generation
from tests.support.rollout import LocalRollout
from tests.support.sampled import no_text
from tests.support.sight import picture, seeing_prompt

T = TypeVar("T")
VIDEO = 4
TOKEN = 7  # of images, in tests.support.sight
DAMAGED = picture(64, 64)[:3000]
# Two with an image, one without, and one whose image cannot be decoded.
PROMPTS = (
    seeing_prompt("p0", picture(9, 5)),
    make_prompt("p1"),
    seeing_prompt("p2", picture(9, 5, 1)),
    seeing_prompt("p3", picture(8, 4, 2)),
)


class Server(FakeSglang):
    """Counts tokens as SGLang does: two of each image, of which one came."""

    async def respond(self, path: str, body: dict[str, Any]) -> Any:
        answer = self.answer(body)
        answer["meta_info"]["prompt_tokens"] = len(body["input_ids"]) + len(body.get("image_data", ()))
        self.answer, before = (lambda _: answer), self.answer
        try:
            return await super().respond(path, body)
        finally:
            self.answer = before


def rolled(
    folder: Path,
    call: Callable[[LocalRollout], Awaitable[T]],
    server: FakeSglang,
    prompts: Sequence[Prompt] = PROMPTS,
    **settings: Any,
) -> T:
    """A conversation with a collector of these prompts, two of which are held out."""

    async def go() -> T:
        async with server as fake:
            found = LocalRollout(
                make_recipe(folder),
                model=PLAIN,
                prompts=PromptSet(tuple(prompts), 0),
                eval_prompts=[seeing_prompt("p8", picture(12, 12)), make_prompt("p9")],
                server=fake.endpoint,
                image_token=TOKEN,
                **settings,
            )
            await found.start()
            try:
                return await call(found)
            finally:
                await found.close()

    return asyncio.run(go())


def shown(shards: Sequence[Shard]) -> dict[int, tuple[bytes, ...]]:
    """By the first token of its prompt, the images of each sequence."""
    found: dict[int, tuple[bytes, ...]] = {}
    for micro in (each for shard in shards for mini in shard.mini_batches for each in mini.micro_batches):
        for at, images in zip(micro.cu_seqlens[:-1], micro.images or ((),) * len(micro.sample_index), strict=True):
            assert found.setdefault(int(micro.tokens[at]), images) == images
    return found


def test_servers_and_ranks_get_the_same_png_which_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, bool]] = []

    def counted(images: Sequence[Image], where: str) -> tuple[bytes, ...]:
        made.append((where, threading.current_thread() is threading.main_thread()))
        return pngs(images, where)

    monkeypatch.setattr(module, "pngs", counted)
    server = Server()

    async def call(found: LocalRollout) -> tuple[list[Shard], list[tuple[Block, ...]], Probe]:
        shards, _ = await found.generate(1, 0)
        return shards, found._blocks, await found.probe()

    shards, [blocks], probe = rolled(tmp_path, call, server)
    assert sorted(made) == [("p0", False), ("p2", False), ("p3", False)]
    ours = {prompt.token_ids[0]: tuple(png(each, "") for each in prompt.images) for prompt in PROMPTS}
    assert shown(shards) == ours and len(set(ours.values())) == 4
    # Two samples of each: their bytes are one object.
    assert len({id(png) for block in blocks for each in block.images or () for png in each}) == 3
    sent = [(body["input_ids"], body.get("image_data", [])) for body in server.bodies("/generate")]
    assert len(sent) == 8
    for ids, urls in sent:
        assert [base64.b64decode(url.removeprefix("data:image/png;base64,")) for url in urls] == [*ours[ids[0]]]
        assert ids[1:] == ([5, TOKEN, 6, 9] if urls else [8, 9])
    # What a weight sync is verified on is text.
    assert probe.images is None and all(TOKEN not in each and each for each in probe.rows)
    told = [json.loads(line) for line in (tmp_path / "run" / "samples" / "step_000001.jsonl").read_text().splitlines()]
    assert {row["id"].split("/")[1]: row.get("images") for row in told} == {"p0": 1, "p1": None, "p2": 1, "p3": 1}


def test_held_out_prompts_show_their_images(tmp_path: Path) -> None:
    server = Server()

    async def call(found: LocalRollout) -> Any:
        return await found.collectors[0].evaluate([0, 1], 3)

    facts = rolled(tmp_path, call, server)
    assert not facts.failed.any()
    bodies = sorted(server.bodies("/generate"), key=lambda body: body["input_ids"])
    [[url], none] = (body.get("image_data", []) for body in bodies)
    assert none == [] and base64.b64decode(url.partition(",")[2]) == png(Image(picture(12, 12), 8, 4), "")
    [told, _] = (tmp_path / "run" / "samples" / "eval_000003.jsonl").read_text().splitlines()
    assert json.loads(told)["images"] == 1


def test_a_journal_gives_the_same_blocks_with_images_made_anew(tmp_path: Path) -> None:
    async def call(found: LocalRollout) -> list[Shard]:
        shards, _ = await found.generate(1, 0)
        return shards

    before = rolled(tmp_path, call, Server())
    journal = tmp_path / "run" / JOURNAL
    [image] = shown(before)[10]
    assert not any(image in each.read_bytes() for each in journal.iterdir()), "it holds no images"
    nobody = Server()
    again = rolled(tmp_path / "other", call, nobody, replay=journal)
    assert shown(again) == shown(before) and nobody.calls == []
    [[first], [second]] = (
        [[m.tokens.tolist() for m in shard.mini_batches[0].micro_batches] for shard in each] for each in (before, again)
    )
    assert first == second


def test_an_image_that_cannot_be_decoded_costs_its_samples_alone(tmp_path: Path) -> None:
    prompts = [*PROMPTS[:3], seeing_prompt("p3", DAMAGED)]
    server = Server()

    async def call(found: LocalRollout) -> tuple[list[Shard], Any]:
        return await found.generate(1, 0)

    shards, info = rolled(tmp_path, call, server, prompts)
    assert {13: ()} not in [shown(shards)] and sorted(shown(shards)) == [10, 11, 12]
    assert "p3, image 1: its bytes cannot be decoded as an image" in info.failure
    assert not any(body["input_ids"][0] == 13 for body in server.bodies("/generate"))


def test_a_prompts_images_tell_it_from_others_in_a_journal() -> None:
    one, two = PROMPTS[0], replace(PROMPTS[0], images=PROMPTS[2].images)
    assert prompt_crc(one) == prompt_crc(replace(one)) != prompt_crc(two)
    # Journals of text that were written before there were images are read as ever.
    text = make_prompt("p3")
    assert prompt_crc(text) == zlib.crc32(text.token_ids.astype(np.int32).tobytes(), zlib.crc32(b"p3"))


def asked(server: FakeSglang, call: Callable[[ServerClient], Awaitable[T]]) -> T:
    async def go() -> T:
        async with server as fake, ServerClient(fake.endpoint, attempts=2, backoff_s=0.001) as client:
            return await call(client)

    return asyncio.run(go())


def test_a_response_in_pieces_fails_behind_a_token_of_images_and_nothing_else_does() -> None:
    server = Server(
        answer=lambda body: generation([TOKEN] * body["sampling_params"]["max_new_tokens"], finish="length")
    )

    async def call(client: ServerClient) -> None:
        request = Request(PROMPTS[0].token_ids, Sampling(4), pictures=Pictures(PROMPTS[0], TOKEN))
        with pytest.raises(RequestFailedError, match="cannot go on behind token 7, which the policy wrote"):
            await request.go_on(client, no_text, deadline_s=9.0, piece_tokens=2)
        whole = Request(PROMPTS[0].token_ids, Sampling(4), pictures=Pictures(PROMPTS[0], TOKEN))
        answered = await whole.go_on(client, no_text, deadline_s=9.0, piece_tokens=4)
        assert answered is not None and answered.token_ids.tolist() == [TOKEN] * 4

    asked(server, call)


@pytest.mark.parametrize("written", [5, TOKEN, VIDEO])
def test_what_is_cut_off_goes_on_with_its_images_but_not_behind_a_token_of_images(written: int) -> None:
    """A server would take that for the place of another image, or of a video, and fail."""
    server = Server(answer=lambda _: generation([written, 8, 9], finish="abort"))

    async def call(client: ServerClient) -> list[dict[str, Any]]:
        request = Request(PROMPTS[0].token_ids, Sampling(8), pictures=Pictures(PROMPTS[0], TOKEN, VIDEO))
        assert await request.go_on(client, no_text, deadline_s=9.0) is None
        server.answer = lambda _: generation([3, END])
        if written != 5:
            with pytest.raises(
                RequestFailedError, match=f"cannot go on behind token {written}, which the policy wrote"
            ):
                await request.go_on(client, no_text, deadline_s=9.0)
        else:
            answer = await request.go_on(client, lambda ids: " ".join(map(str, ids)), deadline_s=9.0)
            assert answer is not None and answer.token_ids.tolist() == [5, 8, 3, END]
        return server.bodies("/generate")

    first, *then = asked(server, call)
    assert first["input_ids"] == [10, 5, TOKEN, 6, 9]
    assert [body["input_ids"] for body in then] == ([] if written != 5 else [[10, 5, TOKEN, 6, 9, 5, 8]])
    assert all(body["image_data"] == first["image_data"] for body in then)


def test_whoever_is_given_up_leaves_the_images_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    def slow(images: Sequence[Image], where: str) -> tuple[bytes, ...]:
        assert goes_on.wait(10)
        return pngs(images, where)

    monkeypatch.setattr(module, "pngs", slow)

    async def go() -> tuple[bytes, ...]:
        pictures = Pictures(PROMPTS[0], TOKEN)
        first, second = (asyncio.create_task(pictures.made()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        goes_on.set()
        return await second

    assert asyncio.run(go()) == pngs(PROMPTS[0].images, "")


def test_a_prompt_without_images_asks_for_nothing() -> None:
    async def go() -> None:
        pictures = Pictures(make_prompt("p1"), None)
        assert await pictures.made() == () and await pictures.sent() is None

    asyncio.run(go())
    with pytest.raises(AssertionError, match="p0 has images that the model does not see"):
        Pictures(PROMPTS[0], None)


def test_a_journal_whose_images_have_changed_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(picture(8, 4))
    prompts = [seeing_prompt("p0", file), *PROMPTS[1:]]

    async def call(found: LocalRollout) -> None:
        await found.generate(1, 0)

    rolled(tmp_path, call, Server(), prompts)
    whole = file.read_bytes()
    file.write_bytes(whole[:60] + bytes(len(whole) - 60))
    with pytest.raises(UserError, match=r"p0, image 1: .*/a.png cannot be decoded as an image"):
        rolled(tmp_path / "other", call, Server(), prompts, replay=tmp_path / "run" / JOURNAL)
    file.write_bytes(picture(9, 4))
    with pytest.raises(MegarlError, match="cannot be replayed any further"):
        rolled(tmp_path / "another", call, Server(), prompts, replay=tmp_path / "run" / JOURNAL)
    assert "sample 1/p0/0 answers another prompt than the row has now" in caplog.text


def test_a_collector_opens_the_recipes_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.rollout.replayed import ReplayCollector
    from megarl.serving.client import ServerEndpoint
    from tests.support.vision import write_tiny_vision_model

    monkeypatch.setattr(Graders, "open", lambda *_, **__: Graders({}))
    model = write_tiny_vision_model(tmp_path / "model")
    (tmp_path / "a.png").write_bytes(picture(56, 60))
    rows = "".join(
        json.dumps({"prompt": text, "answer": "1", "images": "a.png"}) + "\n" for text in ("1+1", "2+<image>1")
    )
    (tmp_path / "train.jsonl").write_text(rows)
    recipe = make_recipe(tmp_path, data={"eval": tmp_path / "train.jsonl"}, model={"path": model})

    async def go() -> None:
        collector = Collector.open(recipe, ServerEndpoint("router", "http://127.0.0.1:9", ""))
        replay = ReplayCollector.open(tmp_path / "journal", recipe)
        for prompts in (collector._prompts.prompts, collector._eval_prompts, replay._prompts.prompts):
            for prompt in prompts:
                assert [(each.width, each.height) for each in prompt.images] == [(56, 56)]
                assert (prompt.token_ids == collector._image_token).sum() == 4
        assert collector._image_token == replay._image_token is not None
        await collector.close()
        await replay.close()

    asyncio.run(go())
