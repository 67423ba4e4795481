"""A teacher behind an address is asked before a device is taken: whether it is there, and has the policy's tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megarl.core.errors import UserError
from megarl.data.chat import load_tokenizer
from megarl.models.hf_config import load_model_config
from megarl.recipe.load import load_recipe
from megarl.recipe.rollout_rules import longest_sample
from megarl.run.teacher_check import check_teacher
from megarl.serving.external import probe_ids
from megarl.serving.server_flags import SPARE_TOKENS
from megarl.serving.teacher import Wanted, check_teachers
from tests.rollout.test_teacher import said, scores
from tests.support.bad_input import Place, good_place
from tests.support.fake_sglang import KEY, FakeSglang
from tests.support.tiny import write_tiny_qwen


class FakeTeacher(FakeSglang):
    """A server of the policy's family, whose context is just long enough."""

    def __init__(self, place: Place) -> None:
        super().__init__("teacher", scores)
        self.ids = list(probe_ids(load_tokenizer(place.model).encode))
        self.context = longest_sample(load_recipe(place.recipe).recipe) + SPARE_TOKENS

    async def respond(self, path: str, body: dict[str, Any]) -> web.Response:
        """Its tokenizer too."""
        if path == "/tokenize":
            return web.json_response({"tokens": self.ids, "count": len(self.ids)})
        if path == "/server_info":  # the smaller of its context and its KV cache, less 6
            return web.json_response({"max_req_input_len": self.context - 6})
        return await super().respond(path, body)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return good_place(tmp_path, write_tiny_qwen(tmp_path / "source" / "model"))


@pytest.fixture
def teacher(place: Place) -> Iterator[FakeTeacher]:
    """In a thread of its own: the check has a loop of its own."""
    loop, fake = asyncio.new_event_loop(), FakeTeacher(place)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(fake.__aenter__(), loop).result(10)
    yield fake
    asyncio.run_coroutine_threadsafe(fake.__aexit__(None, None, None), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def check(place: Place, url: str, *overrides: str, here: bool = True) -> None:
    servers = f"teacher.servers={{urls: ['{url}'], key_env: TEACHER_KEY}}"
    recipe = load_recipe(place.recipe, ["algorithm.policy_loss=distill_top", servers, *overrides]).recipe
    check_teacher(recipe, load_model_config(place.model), here=here)


def test_a_server_of_the_policys_family_is_asked_once_for_what_the_loss_needs(
    place: Place, teacher: FakeTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    check(place, teacher.endpoint.url, "algorithm.distill_top_k=2")
    [body] = teacher.bodies("/generate")
    assert (body["input_ids"], body["top_logprobs_num"]) == (teacher.ids, 2)
    assert set(teacher.keys) == {f"Bearer {KEY}"}
    check(place, teacher.endpoint.url, "algorithm.policy_loss=distill")
    assert "top_logprobs_num" not in teacher.bodies("/generate")[1]
    check(place, "http://127.0.0.1:1", "algorithm.distill_top_k=2", here=False)  # is asked nothing


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            lambda fake: fake.ids.__setitem__(3, 1),
            r"has another tokenizer than model.path: it makes \d+ tokens .*family",
        ),
        (
            lambda fake: setattr(fake, "context", fake.context - 1),
            r"takes sequences of \d+ tokens at most, .*--context-len",
        ),
        (
            lambda fake: fake.refuse.update({"/tokenize": (401, "no")}),
            r"refuses the key. Name .* teacher.servers.key_env",
        ),
        (
            lambda fake: fake.refuse.update({"/tokenize": (404, "no")}),
            r"does not say log-probs of tokens .* answered 404",
        ),
        (
            lambda fake: fake.refuse.update({"/generate": (500, "no")}),
            r"does not say log-probs of tokens .* answered 500",
        ),
        (lambda fake: setattr(fake, "answer", lambda _: {"meta_info": {}}), r"input_token_logprobs is missing"),
        (lambda fake: setattr(fake, "drop_next", 1), r"does not answer: .*Start it, or mend .* teacher.servers.urls"),
    ],
)
def test_a_server_that_cannot_be_asked_is_refused_with_the_way_out(
    place: Place,
    teacher: FakeTeacher,
    monkeypatch: pytest.MonkeyPatch,
    changed: Callable[[FakeTeacher], Any],
    says: str,
) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    changed(teacher)
    with pytest.raises(UserError, match=rf"^The teacher's server {teacher.endpoint.url} .*{says}"):
        check(place, teacher.endpoint.url, "algorithm.distill_top_k=2")


def test_a_teacher_is_known_by_what_it_says_and_all_servers_have_to_say_it(place: Place, teacher: FakeTeacher) -> None:
    wanted = Wanted(tuple(teacher.ids), teacher.context)
    urls, tokens = [teacher.endpoint.url] * 2, list(enumerate(teacher.ids))[1:]
    assert check_teachers(urls, KEY, wanted) == pytest.approx([said(at, token) for at, token in tokens], abs=1e-4)
    lower = iter([0.0, 0.14, 0.0, 0.16])
    teacher.answer = lambda body: scores(body, lower=next(lower))
    check_teachers(urls, KEY, wanted)
    with pytest.raises(UserError, match=r"do not serve the same model: .* 0\.16 apart on average"):
        check_teachers(urls, KEY, wanted)


def test_what_can_be_known_without_asking_is_refused_wherever_the_run_is(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(UserError, match=r"`teacher.servers.key_env` names the environment variable TEACHER_KEY"):
        check(place, "http://127.0.0.1:1", "algorithm.distill_top_k=2", here=False)
    most = load_model_config(place.model).vocab_size
    with pytest.raises(UserError, match=rf"distill_top_k: {most + 1} is more than the vocabulary of model.path"):
        check(place, "http://127.0.0.1:1", f"algorithm.distill_top_k={most + 1}", here=False)
