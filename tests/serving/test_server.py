"""The real SGLang server and router: numbers against transformers, the key, and what they write."""

from __future__ import annotations

import asyncio
import http.client
import json
import select
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megarl.core.errors import DeadlineError
from megarl.core.types import Prompt, Status
from megarl.serving.answers import Generation
from megarl.serving.call_parser import CallParser, Parsed
from megarl.serving.client import ServerClient
from megarl.serving.process import process_tree
from megarl.serving.prompt_scores import PromptScores
from megarl.serving.sampling import Sampling
from tests.support.sampled import generate_sample
from tests.support.served import CONTEXT, KEY, HfModel, Pool
from tests.support.tiny import SPECIAL

pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7, 8, 9], [40, 30, 20], [10] * 12, [60, 61, 60, 61, 62, 63, 64]]
END = SPECIAL.index("<|im_end|>")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_transformers(served: Pool, temperature: float) -> None:
    reference = HfModel(served.model)

    async def go() -> float:
        async with ServerClient(served.router.endpoint) as client:
            sampling = Sampling(32, temperature)
            results = await asyncio.gather(*(client.generate(prompt, sampling) for prompt in PROMPTS * 2))
        differences = []
        for prompt, result in zip(PROMPTS * 2, results, strict=True):
            expected = reference.logprobs([*prompt, *result.token_ids.tolist()], temperature)[len(prompt) - 1 :]
            differences.append(np.abs(expected - result.logprobs).max())
        return float(max(differences))

    assert asyncio.run(go()) < 1e-5


def test_prompt_and_response_fill_all_of_the_context_that_was_asked_for(served: Pool) -> None:
    """To the last token: also where there is no room for more than that one, and where nothing is generated."""

    async def go() -> list[int]:
        async with ServerClient(served.router.endpoint, attempts=1) as client:
            lengths = [len((await client.prompt_scores([5] * CONTEXT)).logprobs)]
            for left in (1, 2, 8):
                while True:  # until one does not end by itself
                    answer = await client.generate([5] * (CONTEXT - left), Sampling(left))
                    if answer.finish == "length":
                        break
                lengths.append(len(answer.token_ids))
        return lengths

    assert asyncio.run(go()) == [CONTEXT - 1, 1, 2, 8]


def test_servers_behind_the_router_read_calls_of_tools(served: Pool) -> None:
    """Of texts that no model has to write for it."""
    tool = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}}}
    call = '<tool_call>\n{{"name": "{}", "arguments": {{"left": {}}}}}\n</tool_call>'
    glm = "<tool_call>multiply\n<arg_key>left</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    texts = [
        f"I count. {call.format('multiply', 3)}\n{call.format('multiply', 4)}",
        "no call",
        call.format("divide", 1),
    ]

    async def go(form: str, texts: Sequence[str]) -> list[Parsed]:
        parser = CallParser(served.router.endpoint, form, [tool])
        try:
            return [await parser.parse(text) for text in texts]
        finally:
            await parser.close()

    two, none, unknown = asyncio.run(go("qwen25", texts))
    assert [(each.name, json.loads(each.arguments)) for each in two.calls] == [
        ("multiply", {"left": 3}),
        ("multiply", {"left": 4}),
    ]
    assert not two.unread and (none.calls, none.unread) == ((), False) and (unknown.calls, unknown.unread) == ((), True)
    for form, call in (("glm45", glm), ("glm47", glm.replace("\n", ""))):
        [own, none] = asyncio.run(go(form, [f"I count. {call}", "no call"]))
        assert [(each.name, json.loads(each.arguments)) for each in own.calls] == [("multiply", {"left": 3})]
        assert (own.text.strip(), own.unread, none.calls, none.unread) == ("I count.", False, (), False)


def test_scores_of_given_tokens_equal_transformers(served: Pool) -> None:
    reference = HfModel(served.model)

    async def go() -> list[list[PromptScores]]:
        async with ServerClient(served.servers[0].endpoint) as client:
            # Twice: the second time the prompts are in the cache. Then of the last tokens, with the likeliest in their places.
            await asyncio.gather(*(client.prompt_scores(prompt) for prompt in PROMPTS))
            return [
                await asyncio.gather(*(client.prompt_scores(prompt) for prompt in PROMPTS)),
                await asyncio.gather(*(client.prompt_scores(prompt, first=2, top=3) for prompt in PROMPTS)),
            ]

    for prompt, whole, part in zip(PROMPTS, *asyncio.run(go()), strict=True):
        expected = reference.logprobs(prompt)
        np.testing.assert_allclose(whole.logprobs, expected, atol=1e-5)
        np.testing.assert_allclose(part.logprobs, expected[1:], atol=1e-5)
        values, ids = reference.distributions(prompt)[1:].topk(3, dim=1)
        np.testing.assert_array_equal(part.top_ids, ids)
        np.testing.assert_allclose(part.top_logprobs, values, atol=1e-5)


def test_a_response_keeps_its_end_token_and_says_how_it_ended(served: Pool) -> None:
    prompt = Prompt("p", np.array([5, 6, 7]), "p", "")

    async def go() -> list[tuple[Status, list[int]]]:
        async with ServerClient(served.router.endpoint) as client:
            samples = await asyncio.gather(
                *(generate_sample(client, prompt, Sampling(200), index=i, deadline_s=60.0) for i in range(16))
            )
        return [(sample.status, sample.response_ids.tolist()) for sample in samples]

    outcomes = asyncio.run(go())
    completed = [tokens for status, tokens in outcomes if status is Status.COMPLETED]
    assert completed, "of 16 responses of up to 200 tokens over 128 words some should have ended by chance"
    for tokens in completed:
        assert tokens[-1] == END
        assert END not in tokens[:-1]
    for status, tokens in outcomes:
        assert status is Status.COMPLETED or len(tokens) == 200


def test_a_stop_string_ends_a_response_whose_tokens_are_all_kept(served: Pool) -> None:
    async def go() -> None:
        async with ServerClient(served.router.endpoint) as client:
            free = await client.generate([5, 6, 7], Sampling(24, temperature=0.0))
            stop = free.text[5]
            stopped = await client.generate([5, 6, 7], Sampling(24, temperature=0.0, stop=(stop,)))
        first = free.text.index(stop)
        assert stopped.finish == "stop"
        assert stopped.text == free.text[:first]
        assert stopped.token_ids.tolist() == free.token_ids[: len(stopped.token_ids)].tolist()
        assert len(stopped.token_ids) == len(stopped.logprobs) > first

    asyncio.run(go())


@pytest.mark.parametrize("which", ["server", "router"])
def test_nothing_is_answered_without_the_key(served: Pool, which: str) -> None:
    process = served.servers[0] if which == "server" else served.router
    endpoint = process.command.endpoint
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=10)
    connection.request("POST", "/generate", '{"text": "a"}', {"Content-Type": "application/json"})
    assert connection.getresponse().status == 401
    connection.close()


def test_the_key_is_on_no_command_line_and_in_no_log(served: Pool) -> None:
    for process in [*served.servers, served.router]:
        for pid in process_tree(process.pid):
            assert KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert KEY not in process.command.log.read_text()
    assert "api_key='***'" in served.servers[0].command.log.read_text().replace("'api_key': ", "api_key=")


def test_servers_and_router_listen_on_loopback_alone(served: Pool) -> None:
    wanted = {process.command.endpoint.port for process in [*served.servers, served.router]}
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].partition(":")
            if fields[3] == "0A" and int(port, 16) in wanted:
                found[int(port, 16)] = address
    assert found == dict.fromkeys(wanted, "0100007F")


def test_an_idle_connection_outlives_a_training_step(served: Pool) -> None:
    """SGLang's default of 5 s closes the router's pooled connections, whose failures then shut out a living server."""
    endpoint = served.servers[0].command.endpoint
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=10)
    connection.request("GET", "/health")
    connection.getresponse().read()
    closed, _, _ = select.select([connection.sock], [], [], 7.0)
    assert not closed, "the server closed an idle connection within 7 s"
    connection.close()


def test_a_server_can_leave_the_router_and_come_back(served: Pool) -> None:
    server = served.servers[0]
    served.router.remove(server.url)
    assert server.url not in served.router.workers()
    served.router.remove(server.url)
    served.router.add(server.endpoint)
    assert server.url in served.router.workers()


def test_a_server_that_rested_answers_as_before(served: Pool) -> None:
    async def answers(client: ServerClient) -> list[Generation]:
        await client.flush_cache(wait_s=10)  # what is cached shows in a log-prob's last bit
        return [await client.generate(prompt, Sampling(8, 0.0)) for prompt in PROMPTS]

    async def go() -> None:
        async with ServerClient(served.servers[0].endpoint) as client:
            before = await answers(client)
            running = asyncio.create_task(client.generate([5, 6], Sampling(1500)))
            await client.generate([7], Sampling(1))
            await client.sleep(("weights", "kv_cache"))
            assert (await running).finish in ("abort", "stop")
            with pytest.raises(DeadlineError):
                await client.generate([5], Sampling(1), deadline_s=0.3)
            await client.wake(("weights",), serve=False)
            await client.wake(("kv_cache",), serve=True)
            after = await answers(client)
        for one, other in zip(before, after, strict=True):
            assert np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.logprobs, other.logprobs)

    asyncio.run(go())


def test_abort_pause_and_flush(served: Pool) -> None:
    async def go() -> None:
        async with ServerClient(served.servers[0].endpoint) as client:
            running = asyncio.create_task(client.generate([5, 6], Sampling(1500)))
            while (await client.generate([7], Sampling(1))).finish not in ("length", "stop"):
                continue
            await client.abort()
            ended = await asyncio.wait_for(running, 30)
            assert ended.finish in ("abort", "stop")
            await client.flush_cache(wait_s=20)
            await client.pause()
            await client.resume()
            assert (await client.generate([5, 6], Sampling(2, 0.0))).cached_tokens == 0

    asyncio.run(go())
