"""A pool that somebody else started is refused, in one paragraph, where it is not what the run needs."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from megarl.core.errors import UserError
from megarl.core.ports import free_port
from megarl.serving.external import ModelFacts, check_external, differences, probe_ids
from tests.support.fake_sglang import KEY, FakeSglang

EXPECTED = ModelFacts("Qwen3-8B", ("Qwen3ForCausalLM",), 4096, (1, 2, 3), "0.5.21", "cuda")
SERVER_INFO = {
    "version": "0.5.21",
    "device": "cuda",
    "tp_size": 2,
    "dp_size": 1,
    "pp_size": 1,
    "enable_return_routed_experts": False,
    "max_req_input_len": 8186,  # of 8192
}


class Pool(FakeSglang):
    """Says what it serves. label: of its weights' version."""

    label = "default"

    async def respond(self, path: str, body: dict[str, Any]) -> web.Response:
        says: dict[str, dict[str, Any]] = {
            "/model_info": {
                "served_model_name": "/models/Qwen3-8B",
                "architectures": ["Qwen3ForCausalLM"],
                "weight_version": self.label,
            },
            "/server_info": SERVER_INFO,
            "/tokenize": {"tokens": [1, 2, 3]},
        }
        return web.json_response(says[path])


@contextmanager
def in_a_thread(fake: FakeSglang) -> Iterator[str]:
    """The fake in an event loop of its own: the check has one as well."""
    ready, stop = threading.Event(), asyncio.Event()
    found: list[Any] = []

    async def serve() -> None:
        async with fake:
            found.extend([fake.endpoint.url, asyncio.get_running_loop()])
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(30)
        yield found[0]
    finally:
        found[1].call_soon_threadsafe(stop.set)
        thread.join(30)


def test_a_pool_that_serves_the_model_is_taken_and_is_asked_with_the_key() -> None:
    fake = Pool()
    with in_a_thread(fake) as url:
        found = check_external([url, url], KEY, EXPECTED)
    assert set(fake.keys) == {f"Bearer {KEY}"} and len(fake.calls) == 6
    assert [(each.url, each.api_key, each.tp) for each in found.endpoints] == [(url, KEY, 2)] * 2
    assert [each.name for each in found.endpoints] == ["external server 0", "external server 1"]
    assert found.expected == EXPECTED and KEY not in repr(found)


def test_one_that_wants_no_key_is_sent_none() -> None:
    fake = Pool()
    with in_a_thread(fake) as url:
        check_external([url], "", EXPECTED)
    assert set(fake.keys) == {None}


@pytest.mark.parametrize(
    ("status", "text", "told"),
    [
        (401, "no", r"refuses the key.*--api-key"),
        (404, "no such page", "does not say what it serves.*404: no such page"),
    ],
)
def test_one_that_refuses_to_say_is_refused(status: int, text: str, told: str) -> None:
    fake = Pool()
    fake.refuse["/model_info"] = (status, text)
    with in_a_thread(fake) as url, pytest.raises(UserError, match=told) as caught:
        check_external([url], KEY, EXPECTED)
    assert url in str(caught.value) and KEY not in str(caught.value) and "\n" not in str(caught.value)


def test_one_that_is_no_sglang_is_refused() -> None:
    with in_a_thread(FakeSglang()) as url, pytest.raises(UserError, match=r"does not say what it serves.*is missing"):
        check_external([url], KEY, EXPECTED)


def test_one_whose_architectures_are_no_names_is_refused() -> None:
    class Odd(Pool):
        async def respond(self, path: str, body: dict[str, Any]) -> web.Response:
            told = {"served_model_name": "Qwen3-8B", "architectures": [None, 1], "weight_version": "0"}
            return web.json_response(told) if path == "/model_info" else await super().respond(path, body)

    with in_a_thread(Odd()) as url, pytest.raises(UserError, match=r"serves 'Qwen3-8B' \(None, 1\)"):
        check_external([url], KEY, EXPECTED)


def test_one_that_was_told_sglangs_own_name_of_the_architecture_is_taken() -> None:
    class Renamed(Pool):
        async def respond(self, path: str, body: dict[str, Any]) -> web.Response:
            told = {"served_model_name": "Qwen3-8B", "architectures": ["Ernie4_5_ForCausalLM"], "weight_version": "0"}
            return web.json_response(told) if path == "/model_info" else await super().respond(path, body)

    with in_a_thread(Renamed()) as url:
        check_external([url], KEY, replace(EXPECTED, architectures=("Ernie4_5ForCausalLM",)))


def test_one_whose_stored_keys_and_values_outlive_the_weights_is_refused() -> None:
    class Storing(Pool):
        async def respond(self, path: str, body: dict[str, Any]) -> web.Response:
            answer = await super().respond(path, body)
            told = json.loads(str(answer.text)) | {"hicache_storage_backend": "file"}
            return web.json_response(told) if path == "/server_info" else answer

    with in_a_thread(Storing()) as url, pytest.raises(UserError, match="runs with --hicache-storage-backend"):
        check_external([url], KEY, EXPECTED)


def test_one_where_nobody_listens_is_refused() -> None:
    with pytest.raises(UserError, match=r"does not answer.*reachable"):
        check_external([f"http://127.0.0.1:{free_port()}"], KEY, EXPECTED)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sglang": "0.5.3"}, r"SGLang 0.5.3; .* sglang==0.5.21"),
        ({"name": "Qwen3-4B"}, "serves 'Qwen3-4B'.* --served-model-name Qwen3-8B"),
        ({"architectures": ("LlamaForCausalLM",)}, "LlamaForCausalLM"),
        ({"probe_ids": (1, 2, 4)}, "another tokenizer"),
        ({"context": 4095}, "4095 tokens at most, by .* KV cache; the recipe's take up to 4096"),
        ({"device": "cpu"}, "is on cpu and the run on cuda"),
        ({"replicas": 2}, "--dp-size 2 and --pp-size 1.*a server for each copy"),
        ({"stages": 4}, "--dp-size 1 and --pp-size 4"),
        ({"store": "--enable-lmcache"}, "runs with --enable-lmcache: what it stores outlives"),
    ],
)
def test_one_that_serves_something_else_is_refused(change: dict[str, Any], told: str) -> None:
    assert differences("http://h:1", EXPECTED, EXPECTED) is None
    problem = differences("http://h:1", replace(EXPECTED, **change), EXPECTED)
    assert problem is not None and re.search(told, problem) and "http://h:1" in problem


def test_what_only_some_runs_need_is_asked_of_those_alone() -> None:
    assert differences("http://h:1", replace(EXPECTED, routing=True, weight_version="17"), EXPECTED) is None
    lacking = differences("http://h:1", EXPECTED, replace(EXPECTED, routing=True))
    assert lacking is not None and "--enable-return-routed-experts" in lacking
    trained = differences("http://h:1", replace(EXPECTED, weight_version="17"), replace(EXPECTED, weight_version="0"))
    assert trained is not None and "weights are of version '17'" in trained and "--weight-version 0" in trained


def test_what_a_tokenizer_makes_of_the_probe_tells_tokenizers_apart() -> None:
    assert probe_ids(lambda text: list(text.encode())) != probe_ids(lambda text: [ord(letter) for letter in text])
