"""What every transport says to servers."""

from __future__ import annotations

import asyncio
import base64
import pickle
import time
from dataclasses import replace
from typing import Any

import pytest

from megarl.serving.client import ServerClient
from megarl.serving.sglang_kv_scales import LOADER
from megarl.sync.session import begin
from tests.support.fake_sglang import FakeSglang


def told(**differs: Any) -> list[tuple[str, Any]]:
    """What a server is told as an update begins."""

    async def go() -> list[tuple[str, Any]]:
        async with FakeSglang() as fake, ServerClient(replace(fake.endpoint, **differs)) as client:
            await begin(client, time.monotonic() + 10.0)
            return [*fake.calls]

    return asyncio.run(go())


@pytest.mark.parametrize("tp", [1, 2])
def test_a_server_in_fp8_is_told_what_it_calls_before_weights_come(tp: int) -> None:
    (opened, _), (path, body) = told(tp=tp, loader=LOADER)
    assert (opened, path) == ("/begin_weight_update", "/update_weights_from_tensor")
    assert body.pop("selector") == "target"
    payloads = body.pop("serialized_named_tensors")
    assert [pickle.loads(base64.b64decode(each)) for each in payloads] == [[]] * tp
    assert body == {"load_format": LOADER, "flush_cache": False}


def test_another_server_is_told_of_the_update_alone() -> None:
    assert told() == [("/begin_weight_update", {"selector": "target"})]
