"""The client against a fake server: what it sends, what it makes of answers, and what it says of failures."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import pytest
from aiohttp import web

from megarl.core.errors import DeadlineError
from megarl.core.ports import free_port
from megarl.core.types import VersionSpan
from megarl.serving.answers import AnswerError
from megarl.serving.client import ATTEMPTS, ServerClient, ServerEndpoint, ServerError, ServerUnreachableError
from megarl.serving.images import SentImages
from megarl.serving.sampling import Sampling
from tests.support.fake_sglang import KEY, FakeSglang, generation

T = TypeVar("T")


def talk(
    call: Callable[[ServerClient], Awaitable[T]], prepare: Callable[[FakeSglang], None] = lambda _: None
) -> tuple[T, FakeSglang]:
    """Run one conversation with a fake server."""

    async def go() -> tuple[T, FakeSglang]:
        async with FakeSglang() as fake, ServerClient(fake.endpoint, backoff_s=0.001) as client:
            prepare(fake)
            return await call(client), fake

    return asyncio.run(go())


def test_a_generation_is_typed_and_keeps_the_end_token() -> None:
    result, fake = talk(lambda client: client.generate(np.array([7, 8, 9]), Sampling(16, 0.7, 0.9, 5, ("x",))))
    assert result.token_ids.tolist() == [5, 6, 2]
    assert result.logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert (result.finish, result.text, result.prompt_tokens, result.cached_tokens) == ("stop", "42", 3, 1)
    assert result.versions == (VersionSpan(0, 0, 3),)
    assert fake.calls == [
        (
            "/generate",
            {
                "input_ids": [7, 8, 9],
                "sampling_params": {
                    "max_new_tokens": 16,
                    "temperature": 0.7,
                    "top_p": 0.9,
                    "top_k": 5,
                    "stop": ["x"],
                },
                "return_logprob": True,
            },
        )
    ]


def test_a_seed_and_a_cache_of_its_own_are_asked_for() -> None:
    async def ask(client: ServerClient) -> None:
        for prompt in ([7, 8], [7, 8], [7, 8, 9]):
            await client.generate(prompt, Sampling(4, seed=2**63 - 1, alone=True))
        await client.generate([7, 8], Sampling(4))

    _, fake = talk(ask)
    bodies = [body for _, body in fake.calls]
    assert [body["sampling_params"].get("sampling_seed") for body in bodies] == [2**63 - 1] * 3 + [None]
    first, again, longer, plain = (body.get("extra_key") for body in bodies)
    assert first == again and first and longer not in (None, first) and plain is None


def test_versions_that_changed_in_between_are_kept_as_spans() -> None:
    def prepare(fake: FakeSglang) -> None:
        answer = generation([5, 6, 7])
        answer["meta_info"]["weight_versions"] = [
            {"version": "4", "start": 0, "end": 2},
            {"version": "5", "start": 2, "end": 3},
        ]
        fake.answer = lambda _: answer

    result, _ = talk(lambda client: client.generate([1], Sampling(3)), prepare)
    assert result.versions == (VersionSpan(4, 0, 2), VersionSpan(5, 2, 3))


def test_routing_comes_back_where_it_was_asked_for() -> None:
    chosen = np.arange(5 * 2 * 2, dtype=np.int32).reshape(5, 2, 2)  # 3 + 3 - 1 tokens, 2 layers, 2 experts each

    def prepare(fake: FakeSglang) -> None:
        answer = generation([5, 6, 7])
        answer["meta_info"]["routed_experts"] = base64.b64encode(chosen.tobytes()).decode()
        fake.answer = lambda _: answer

    result, fake = talk(lambda client: client.generate([1, 2, 3], Sampling(3, routing=True)), prepare)
    assert fake.bodies("/generate")[0]["return_routed_experts"] is True
    assert result.routing is not None
    assert result.routing.dtype == np.int16
    assert result.routing.tolist() == chosen.reshape(5, 4).tolist()


def test_a_routing_that_was_asked_for_and_does_not_come_is_an_error_and_no_silence() -> None:
    async def call(client: ServerClient) -> None:
        with pytest.raises(AnswerError, match="which experts it chose"):
            await client.generate([1, 2, 3], Sampling(3, routing=True))

    talk(call)


def test_the_key_is_sent_but_never_shown() -> None:
    _, fake = talk(lambda client: client.weight_version())
    assert fake.keys == [f"Bearer {KEY}"]
    assert KEY not in repr(ServerEndpoint("server 0", "http://h:1", KEY))


def test_a_server_that_shows_what_it_was_asked_does_not_show_the_key() -> None:
    def prepare(fake: FakeSglang) -> None:
        fake.refuse["/generate"] = (500, f"debug: Authorization: Bearer {KEY} of POST")

    with pytest.raises(ServerError, match=r"Bearer \*\*\* of POST") as caught:
        talk(lambda client: client.generate([1], Sampling(3)), prepare)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("status", [302, 307])
def test_a_redirect_is_an_error_that_says_where_to_and_nothing_is_sent_there(status: int) -> None:
    class Moved(FakeSglang):
        async def respond(self, path: str, body: dict[str, Any]) -> web.Response:
            return web.Response(status=status, headers={"Location": f"{elsewhere.endpoint.url}{path}"})

    elsewhere = FakeSglang()

    async def go() -> None:
        async with elsewhere, Moved() as fake, ServerClient(fake.endpoint) as client:
            with pytest.raises(ServerError, match=rf"answered {status}: a redirect to {elsewhere.endpoint.url}"):
                await client.begin_weight_update()

    asyncio.run(go())
    assert not elsewhere.calls


def test_a_broken_connection_is_tried_again() -> None:
    def prepare(fake: FakeSglang) -> None:
        fake.drop_next = 2

    result, fake = talk(lambda client: client.generate([1], Sampling(3)), prepare)
    assert result.token_ids.tolist() == [5, 6, 2]
    assert len(fake.bodies("/generate")) == 3


def test_a_router_without_servers_at_the_moment_is_tried_again() -> None:
    async def call(client: ServerClient) -> list[int]:
        generating = asyncio.create_task(client.generate([1], Sampling(3)))
        while len(made[0].calls) < 2:
            await asyncio.sleep(0)
        made[0].refuse.clear()
        return (await generating).token_ids.tolist()

    made: list[FakeSglang] = []

    def prepare(fake: FakeSglang) -> None:
        made.append(fake)
        fake.refuse["/generate"] = (503, "no workers are available")

    tokens, _ = talk(call, prepare)
    assert tokens == [5, 6, 2]


def test_after_the_last_broken_connection_the_error_names_server_and_endpoint() -> None:
    def prepare(fake: FakeSglang) -> None:
        fake.drop_next = ATTEMPTS

    with pytest.raises(ServerUnreachableError, match=r"server 0 \(http://127.0.0.1:\d+\) /generate: no answer"):
        talk(lambda client: client.generate([1], Sampling(3)), prepare)


def test_only_generation_is_tried_again() -> None:
    def prepare(fake: FakeSglang) -> None:
        fake.drop_next = 1

    with pytest.raises(ServerUnreachableError):
        talk(lambda client: client.begin_weight_update(), prepare)


def test_nobody_listening_is_unreachable() -> None:
    async def go() -> None:
        async with ServerClient(ServerEndpoint("server 7", f"http://127.0.0.1:{free_port()}", KEY)) as client:
            assert not await client.health()
            await client.flush_cache()

    with pytest.raises(ServerUnreachableError, match="server 7"):
        asyncio.run(go())


def test_an_error_shows_what_the_server_answered_and_is_not_tried_again() -> None:
    calls = []

    def prepare(fake: FakeSglang) -> None:
        fake.refuse["/generate"] = (400, "the prompt is longer than the model's context")
        calls.append(fake)

    with pytest.raises(ServerError, match=r"server 0 .* /generate answered 400: the prompt is longer") as caught:
        talk(lambda client: client.generate([1], Sampling(3)), prepare)
    assert caught.value.status == 400
    assert len(calls[0].calls) == 1


def test_a_late_answer_is_a_deadline_error_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(DeadlineError, match=r"server 0 .* /generate: no answer within 0.05 s"):
        talk(lambda client: client.generate([1], Sampling(3), 0.05), lambda fake: fake.hang.add("/generate"))
    assert time.monotonic() - began < 5


def test_health_is_false_when_late() -> None:
    healthy, _ = talk(lambda client: client.health(0.05), lambda fake: fake.hang.add("/health"))
    assert healthy is False


def test_scores_of_given_tokens_leave_out_the_first() -> None:
    def prepare(fake: FakeSglang) -> None:
        answer = generation([])
        answer["meta_info"]["input_token_logprobs"] = [[None, 4, None], [-0.5, 5, None], [-1.5, 6, None]]
        fake.answer = lambda _: answer

    result, fake = talk(lambda client: client.prompt_scores([4, 5, 6]), prepare)
    assert (result.logprobs.tolist(), result.top_ids.shape) == ([-0.5, -1.5], (2, 0))
    assert fake.bodies("/generate")[0]["logprob_start_len"] == 0


def test_weight_update_calls_say_what_sglang_expects() -> None:
    async def call(client: ServerClient) -> None:
        await client.init_group(
            host="h", port=1, rank_offset=1, world_size=2, group="g", backend="gloo", deadline_s=1.0
        )
        await client.begin_weight_update()
        await client.update_from_distributed(["a"], ["float32"], [(2, 3)], "g", 1.0)
        await client.end_weight_update()
        await client.set_weight_version(12)
        await client.destroy_group("g")

    _, fake = talk(call)
    assert [path for path, _ in fake.calls] == [
        "/init_weights_update_group",
        "/begin_weight_update",
        "/update_weights_from_distributed",
        "/end_weight_update",
        "/update_weight_version",
        "/destroy_weights_update_group",
    ]
    assert fake.calls[1][1] == {"selector": "target"}
    assert fake.calls[2][1] == {
        "selector": "target",  # and no draft
        "names": ["a"],
        "dtypes": ["float32"],
        "shapes": [[2, 3]],
        "group_name": "g",
        "load_format": "flattened_bucket",
        "flush_cache": True,
    }
    assert fake.calls[4][1] == {"new_version": "12", "abort_all_requests": False}


def test_cached_prefixes_are_kept_for_requests_that_are_held() -> None:
    async def call(client: ServerClient) -> None:
        await client.pause("in_place")
        await client.update_from_distributed(["a"], ["float32"], [[2]], "g", 5.0, flush_cache=False)
        await client.resume()

    _, fake = talk(call)
    assert [path for path, _ in fake.calls] == [
        "/pause_generation",
        "/update_weights_from_distributed",
        "/continue_generation",
    ]
    assert fake.calls[0][1] == {"mode": "in_place"} and fake.calls[1][1]["flush_cache"] is False


def test_a_server_is_idle_before_it_sleeps_and_is_never_asked_to_wait_in_whole_seconds() -> None:
    _, fake = talk(lambda client: client.sleep(["kv_cache"], 60.0))
    assert fake.calls == [
        ("/abort_request", {"abort_all": True}),
        ("/flush_cache", {}),  # answered once it is idle
        ("/pause_generation", {"mode": "retract"}),  # "abort" would look again after a second
        ("/release_memory_occupation", {"tags": ["kv_cache"]}),
    ]


@pytest.mark.parametrize(("late", "slept"), [(1, True), (2, True), (3, False)])
def test_a_request_that_was_on_its_way_is_ended_too_before_a_server_sleeps(late: int, slept: bool) -> None:
    class Busy(FakeSglang):
        async def respond(self, path: str, body: dict[str, Any]) -> web.Response:
            refused = path == "/flush_cache" and len(self.bodies(path)) <= late
            return web.Response(status=400, text="requests run") if refused else await super().respond(path, body)

    async def go() -> list[str]:
        async with Busy() as fake, ServerClient(fake.endpoint) as client:
            if slept:
                await client.sleep(["kv_cache"], 60.0)
            else:
                with pytest.raises(ServerError, match="requests run"):
                    await client.sleep(["kv_cache"], 60.0)
            return [path for path, _ in fake.calls]

    tries = ["/abort_request", "/flush_cache"] * min(late + 1, 3)
    assert asyncio.run(go()) == tries + ["/pause_generation", "/release_memory_occupation"] * slept


@pytest.mark.parametrize("lost", ["drops", "refuses"])
def test_whoever_wants_no_request_any_more_does_not_wait_for_a_server(lost: str) -> None:
    def prepare(fake: FakeSglang) -> None:
        if lost == "drops":
            fake.drop_next = 99
        else:
            fake.refuse["/generate"] = (503, "no workers are available")

    asked = iter([False, False, True])

    async def call(client: ServerClient) -> str:
        with pytest.raises((ServerUnreachableError, ServerError)):
            await client.generate([7], Sampling(4), gives_up=lambda: next(asked))
        return "gave up"

    assert talk(call, prepare)[0] == "gave up"
    assert next(asked, None) is None, "after the third try"


PROMPT = np.array([5, 7, 7, 7, 6, 9, 5, 7, 6], np.int32)  # an image of three squares, and one of one
SENT = SentImages((b"one", b"two"), 7)


def test_images_go_beside_tokens_of_which_one_stands_for_each() -> None:
    result, fake = talk(
        lambda client: client.generate(PROMPT, Sampling(16), images=SENT), lambda fake: set_prompt_tokens(fake, 9)
    )
    assert result.prompt_tokens == 9
    [body] = fake.bodies("/generate")
    assert body["input_ids"] == [5, 7, 6, 9, 5, 7, 6]
    assert body["image_data"] == ["data:image/png;base64,b25l", "data:image/png;base64,dHdv"]
    _, fake = talk(lambda client: client.generate(PROMPT, Sampling(16)))
    assert fake.bodies("/generate")[0].keys() == body.keys() - {"image_data"}


@pytest.mark.parametrize("read", [7, 8, 10])
def test_a_server_that_makes_other_numbers_of_tokens_of_images_is_told_of(read: int) -> None:
    """More than were sent are wrong as well: the trainer would train on other tokens than the server has seen."""
    says = (
        rf"/generate answered to {read} tokens, and was asked with 9, those of 2 images among them.*AVOID_RETOKENIZE=1"
    )
    with pytest.raises(AnswerError, match=says):
        talk(
            lambda client: client.generate(PROMPT, Sampling(16), images=SENT),
            lambda fake: set_prompt_tokens(fake, read),
        )


def test_a_cache_of_its_own_is_one_images_own_too() -> None:
    async def keys(client: ServerClient) -> None:
        for images in (SENT, SentImages((b"one", b"three"), 7), SENT, None):
            await client.generate(PROMPT, Sampling(16, alone=True), images=images)

    _, fake = talk(keys, lambda fake: set_prompt_tokens(fake, 9))
    first, second, third, without = (body["extra_key"] for body in fake.bodies("/generate"))
    assert first == third and len({first, second, without}) == 3


def set_prompt_tokens(fake: FakeSglang, count: int) -> None:
    """What the server says of how many tokens it made of the prompt."""
    answer = generation([5, 6, 2])
    answer["meta_info"]["prompt_tokens"] = count
    fake.answer = lambda _: answer
