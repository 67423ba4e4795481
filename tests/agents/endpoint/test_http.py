"""The endpoint's HTTP: models, keys, streams, and errors where a client of OpenAI's API looks for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from openai import AsyncOpenAI

from megarl.agents.endpoint import http
from megarl.agents.endpoint.free import FreeSession
from megarl.agents.endpoint.http import Endpoint
from megarl.agents.endpoint.model import Model
from megarl.agents.observer import Observer
from megarl.rollout.asking import Asker
from megarl.rollout.gate import Gate
from megarl.serving.client import ServerClient
from tests.agents.endpoint.harnesses import MODEL, TOKENIZER, ids_of, writing
from tests.agents.endpoint.test_session import TOOL
from tests.agents.forms import make_tokenizer
from tests.agents.playing import LONG_S
from tests.agents.test_tools import FakeReader
from tests.support.fake_sglang import FakeSglang

ASKED: Any = [{"role": "user", "content": "Guess."}]
CONTEXT = 200

Call = Callable[[AsyncOpenAI, Endpoint], Awaitable[None]]


def served(fake: FakeSglang, call: Call, tokenizer: Any = TOKENIZER, observer: Observer | None = None) -> None:
    """A call with the stock client, of an endpoint of nobody's episode. observer: of a model that sees images."""

    async def go() -> None:
        async with fake, ServerClient(fake.endpoint, attempts=3, backoff_s=0.001) as server:
            model = Model(MODEL, tokenizer, FakeReader(), observer)
            endpoint = Endpoint(model)
            session = FreeSession(Asker(server, Gate(8, 1), tokenizer.decode, deadline_s=LONG_S), model, CONTEXT)
            url = await endpoint.start()
            try:
                async with AsyncOpenAI(base_url=url, api_key=endpoint.open(session), max_retries=0) as client:
                    await call(client, endpoint)
            finally:
                await endpoint.close()

    asyncio.run(asyncio.wait_for(go(), 300))


def test_models_are_listed() -> None:
    async def call(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).owned_by == "megarl"
        with pytest.raises(openai.NotFoundError, match="is called 'gpt-4o-mini'"):
            await client.models.retrieve("gpt-5")

    served(writing("1"), call)


def test_who_has_no_key_or_another_gets_nothing() -> None:
    async def call(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        with pytest.raises(openai.AuthenticationError) as caught:
            other = client.with_options(api_key="sk-other")
            await other.chat.completions.create(model=MODEL, messages=ASKED)
        assert caught.value.code == "invalid_api_key"
        async with aiohttp.ClientSession() as session, session.get(f"{endpoint.url}/models") as answer:
            assert answer.status == 401 and "There is no key" in (await answer.json())["error"]["message"]
        endpoint.end(client.api_key)
        with pytest.raises(openai.AuthenticationError, match="or its episode has ended"):
            await client.models.list()

    fake = writing("1")
    served(fake, call)
    assert not fake.bodies("/generate")


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"model": "gpt-5"}, "model", "'gpt-5' is not served here: it is called 'gpt-4o-mini'"),
        ({"messages": []}, "messages", "messages: List should have at least 1 item"),
        ({"messages": [{"role": "user"}, {"role": "assistant", "content": "x"}]}, "messages", "end with another one"),
        ({"messages": [{"role": "usr", "content": "x"}]}, "messages.0.role", "Input should be 'system'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content",
            "an image that is no data URL: wanted is data:image/png;base64,..., and none is fetched",
        ),
        ({"messages": [{"role": "user", "content": "high" * 300}]}, "messages", "and the model's context is 200"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"n": 1000}, "n", "less than or equal to 64"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "not supported here, other than 0. Leave it out"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported here, other than"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice", "Input should be 'auto' or 'none'"),
        ({"extra_body": {"temprature": 1}}, "temprature", "Unknown parameter: temprature. Did you mean temperature?"),
        ({"extra_body": {"top_k": 1}}, "top_k", "Unknown parameter: top_k"),
        ({"stop": ""}, "stop", "at least 1 character"),
        (
            {"tools": [TOOL, {"type": "function", "name": "x", "parameters": {}}]},
            "tools",
            "tool 2 is no function with a name",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools", "tool 1 is no function with a name"),
        (
            {"tools": [TOOL, {"type": "function", "function": {"name": "x", "parameters": "{}"}}]},
            "tools",
            "tool 2 (x): its parameters is '{}'; wanted is a JSON schema",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "x", "description": ["a"]}}]},
            "tools",
            "tool 1 (x): its description is ['a']; wanted is a text",
        ),
    ],
)
def test_what_is_not_honoured_is_refused_in_openais_form(changes: dict[str, Any], param: str, says: str) -> None:
    async def call(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(**{"model": MODEL, "messages": ASKED, **changes})
        assert caught.value.status_code == (404 if param == "model" else 400)
        assert caught.value.param == param and says in str(caught.value)
        assert caught.value.type == "invalid_request_error"

    served(writing("1"), call)


PLAIN = (
    "{% for message in messages if message.role != 'tool' %}{{ message.role }}: {{ message.content }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
CALLED: Any = [
    *ASKED,
    {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "what it gave"},
]


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"tools": [TOOL]}, "tools", "tells it nothing of the tool 'multiply'"),
        ({"messages": [*CALLED[:2], *ASKED]}, "messages", "leaves out calls of tools"),
        ({"messages": [*ASKED, CALLED[2]]}, "messages", "leaves out what tools gave"),
    ],
)
def test_what_a_template_leaves_out_is_refused(changes: dict[str, Any], param: str, says: str) -> None:
    async def call(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**{"model": MODEL, "messages": ASKED, **changes})
        assert caught.value.param == param and says in str(caught.value)
        assert (await client.chat.completions.create(model=MODEL, messages=ASKED)).choices

    served(writing("1"), call, make_tokenizer("qwen3", template=PLAIN))


def test_calls_and_results_that_a_template_shows_are_taken() -> None:
    async def call(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        for _ in range(2):
            assert (await client.chat.completions.create(model=MODEL, messages=CALLED, tools=[TOOL])).choices

    by_null = "{% if message.content is none %}{{ message.tool_calls[0].function.arguments + 'x' }}{% else %}"
    by_null += "{{ message.content }}{% endif %}"
    shows = "{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.id }}{% endfor %}"
    for shown in (shows, by_null):
        template = PLAIN.replace(" if message.role != 'tool'", "").replace("{{ message.content }}", shown)
        template = "{% if tools %}{{ tools[0].function.name }}{% endif %}" + template
        served(writing("1"), call, make_tokenizer("qwen3", template=template))


def test_what_changes_nothing_is_taken() -> None:
    async def call(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=ASKED,
            user="me",
            frequency_penalty=0,
            presence_penalty=0.0,
            logit_bias={},
            response_format={"type": "text"},
            store=False,
            parallel_tool_calls=True,
        )
        assert answer.choices[0].message.content == "1"

    served(writing("1"), call)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("POST", "/chat/completions", b"{", 400, "The body is no JSON"),
        ("POST", "/chat/completions", b"[]", 400, "wanted is a JSON object"),
        ("POST", "/chat/completions", b'{"model": "gpt-4o-mini"}', 400, "Missing parameter: messages"),
        ("POST", "/completions", b'{"model": "gpt-4o-mini", "prompt": ["a", "b"]}', 400, "several prompts are several"),
        (
            "POST",
            "/completions",
            b'{"model": "gpt-4o-mini", "prompt": [[1, 2]]}',
            400,
            "prompt: wanted is one text, or",
        ),
        ("POST", "/completions", b'{"model": "gpt-4o-mini"}', 400, "Missing parameter: prompt"),
        (
            "POST",
            "/chat/completions",
            b'{"model": "gpt-4o-mini", "messages": [{"role": "user"}], "stop": [%b"a"]}' % (b'"a", ' * 16),
            400,
            "stop: wanted is a text, or a list of up to 16",
        ),
        ("GET", "/chat/completions", b"", 405, "Method Not Allowed"),
        ("POST", "/embeddings", b"{}", 404, "Not Found"),
        ("POST", "/episode/reward", b'{"reward": 1}', 400, "Nothing is trained here"),
        ("POST", "/episode/reward", b'{"reward": NaN}', 400, "The body is no JSON"),
        (
            "POST",
            "/episode/reward",
            b'{"reward": 1e39}',
            400,
            "reward: Input should be less than or equal to 1000000000",
        ),
        ("POST", "/episode/reward", b'{"reward": "x"}', 400, "reward: Input should be a valid number"),
    ],
)
def test_bodies_and_paths_that_are_wrong(method: str, path: str, body: bytes, status: int, says: str) -> None:
    async def call(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        headers = {"Authorization": f"Bearer {client.api_key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.request(method, f"{endpoint.url}{path}", data=body) as answer,
        ):
            error = (await answer.json())["error"]
            assert answer.status == status and says in error["message"]
            assert set(error) == {"message", "type", "param", "code"}

    served(writing("1"), call)


def test_a_compressed_body_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def call(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        headers = {"Authorization": f"Bearer {client.api_key}", "Content-Encoding": "gzip"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{endpoint.url}/chat/completions", data=b"{}") as answer,
        ):
            error = (await answer.json())["error"]
            assert answer.status == 415 and "compressed (gzip): send it as it is" in error["message"], error

    served(writing("1"), call)
    assert not caplog.records


def test_a_stream_says_the_same_as_an_answer_in_one_piece() -> None:
    async def call(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        asked: Any = {"model": MODEL, "messages": ASKED, "n": 2, "logprobs": True}
        whole = await client.chat.completions.create(**asked)
        stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        texts, ends, usage, logprobs = {0: "", 1: ""}, {}, None, 0
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ends[choice.index] = choice.finish_reason or ends.get(choice.index)
                logprobs += len((choice.logprobs and choice.logprobs.content) or ())
        assert texts == {choice.index: choice.message.content for choice in whole.choices}
        assert ends == {0: "stop", 1: "stop"} and usage == whole.usage and logprobs == 2 * len(ids_of("high5"))

    served(writing("high5"), call)


def test_a_stream_has_calls_of_tools() -> None:
    async def call(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        strict: Any = {**TOOL, "function": {**TOOL["function"], "strict": True}}
        async with client.chat.completions.stream(model=MODEL, messages=ASKED, tools=[strict]) as stream:
            final = await stream.get_final_completion()
        [message] = [choice.message for choice in final.choices]
        calls = message.tool_calls or []
        assert [(each.function.name, each.function.arguments) for each in calls] == [
            ("multiply", '{"left": 1}'),
            ("multiply", '{"left": 2}'),
        ]
        assert final.choices[0].finish_reason == "tool_calls"

    served(writing("12"), call)


def test_a_stream_of_a_completion() -> None:
    async def call(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        stream = await client.completions.create(model=MODEL, prompt="low", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "high5"

    served(writing("high5"), call)


def test_a_stream_that_waits_says_so_and_tells_of_an_error_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BEAT_S", 0.05)
    fake = writing("1")

    async def call(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        fake.gate = asyncio.Event()
        body = json.dumps({"model": MODEL, "messages": ASKED, "stream": True})
        headers = {"Authorization": f"Bearer {client.api_key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{endpoint.url}/chat/completions", data=body) as answer,
        ):
            assert answer.content_type == "text/event-stream"
            assert await answer.content.readline() == b": the model is at it\n"
            fake.answer = lambda _: {"text": "nothing else"}
            fake.gate.set()
            rest = (await answer.content.read()).decode()
            assert '"type":"server_error"' in rest and "[DONE]" not in rest

    served(fake, call)


def test_who_hangs_up_at_the_end_of_a_stream_is_no_fault_of_ours(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = web.StreamResponse.write_eof

    async def write_eof(response: web.StreamResponse, data: bytes = b"") -> None:
        if not isinstance(response, web.Response):
            raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")
        await plain(response, data)

    async def call(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        body = json.dumps({"model": MODEL, "messages": ASKED, "stream": True})
        headers = {"Authorization": f"Bearer {client.api_key}"}
        url = f"{endpoint.url}/chat/completions"
        async with aiohttp.ClientSession(headers=headers) as session, session.post(url, data=body) as answer:
            assert answer.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()

    monkeypatch.setattr(web.StreamResponse, "write_eof", write_eof)
    served(writing("1"), call)
    assert not [each for each in caplog.records if each.exc_info]


def test_who_hangs_up_ends_what_was_asked() -> None:
    fake = writing("1")

    async def call(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        fake.gate = asyncio.Event()
        for stream in (False, True):
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(model=MODEL, messages=ASKED, timeout=0.1, stream=stream)
            while any(endpoint._handling.values()):
                await asyncio.sleep(0.001)
        fake.gate.set()

    served(fake, call)


def test_free_requests_are_sampled_as_they_ask() -> None:
    fake = writing("1")

    async def call(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        await client.chat.completions.create(
            model=MODEL, messages=ASKED, temperature=0.3, top_p=0.7, seed=5, n=2, stop="]", max_completion_tokens=7
        )
        await client.chat.completions.create(model=MODEL, messages=ASKED)

    served(fake, call)
    one, two, free = [body["sampling_params"] for body in fake.bodies("/generate")]
    wanted = {"temperature": 0.3, "top_p": 0.7, "top_k": -1, "stop": ["]"], "max_new_tokens": 7}
    assert one == wanted | {"sampling_seed": 5} and two == wanted | {"sampling_seed": 6}
    prompt = len(fake.bodies("/generate")[2]["input_ids"])
    assert free["temperature"] == 1.0 and free["max_new_tokens"] == CONTEXT - prompt
