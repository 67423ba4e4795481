"""Weights sent to the real SGLang server: its log-probs are then the new weights', and a wrong weight is found out."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from megarl.core.errors import SyncError
from megarl.core.platform import Platform
from megarl.models.hf_weights import Bucket
from megarl.serving.answers import Generation
from megarl.serving.client import ServerClient, ServerError
from megarl.serving.sampling import Sampling
from megarl.sync.session import meet
from megarl.sync.verify import probe_servers, verify
from tests.support.served import TRIES, HfModel, Pool, begun
from tests.sync.given import BroadcastBuckets
from tests.sync.written import DiskBuckets, SharedBuckets

pytestmark = pytest.mark.slow

PROBE = [[5, 6, 7, 8, 9, 10], [40, 30, 20], [60, 61, 60, 61, 62, 63, 64]]
TOLERANCE = 1e-4


Sender = BroadcastBuckets | SharedBuckets | DiskBuckets


@pytest.fixture(params=["broadcast", "shared_memory", "disk", "disk in place"])
def sender(
    served: Pool, platform: Platform, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Sender]:
    """A sender of each transport, which gives the server its own weights back in the end."""
    if request.param == "broadcast" and platform.backend != "gloo":
        pytest.skip("needs gloo between both ends, and servers on devices take NCCL")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # as in the processes of a run
    made: Sender = SharedBuckets(tmp_path / "registry")
    if request.param == "broadcast":
        made = BroadcastBuckets()
    elif request.param.startswith("disk"):
        made = DiskBuckets(tmp_path, in_place=request.param == "disk in place")
    yield made
    original = HfModel(served.model)
    if isinstance(made, DiskBuckets):
        made = DiskBuckets(tmp_path)
    report = made.send(original.buckets, 0, [served.servers[0].endpoint])
    assert report is not None and not report.failed, report
    made.close()


def difference(served: Pool, trainer: HfModel, version: int) -> float:
    """What verify makes of the server's answers."""
    answers = asyncio.run(probe_servers([served.servers[0].endpoint], PROBE, 60.0))
    return verify([trainer.logprobs(row) for row in PROBE], answers.logprobs, TOLERANCE, version)


def test_new_weights_arrive_and_serve_under_their_version(served: Pool, sender: Sender) -> None:
    trainer = HfModel(served.model)
    server = served.servers[0].endpoint
    for version in (1, 2):
        trainer.perturb(version)
        with pytest.raises(SyncError, match="server 0"):
            difference(served, trainer, version)
        report = sender.send(trainer.buckets, version, [server])
        assert report is not None
        assert (report.ok, report.failed) == (("server 0",), {})
        assert difference(served, trainer, version) < 1e-5

    async def go() -> None:
        async with ServerClient(served.router.endpoint) as client:
            result = await client.generate([5, 6, 7, 8], Sampling(16))
            assert [span.version for span in result.versions] == [2]
            expected = trainer.logprobs([5, 6, 7, 8, *result.token_ids.tolist()])[3:]
            np.testing.assert_allclose(result.logprobs, expected, atol=1e-5)

    asyncio.run(go())


def test_a_server_s_ranks_meet_while_weights_are_sent(served: Pool) -> None:
    async def go() -> None:
        async with ServerClient(served.servers[0].endpoint) as client:
            await client.begin_weight_update()
            await meet(client, time.monotonic() + 30.0)
            await client.end_weight_update()

    asyncio.run(go())


def test_a_server_that_goes_on_alone_holds_nothing_of_a_sender_that_left(served: Pool) -> None:
    buckets = BroadcastBuckets()
    sender = buckets.sender
    server = served.servers[0].endpoint
    buckets.send(HfModel(served.model).buckets, 1, [server])
    [group] = sender._asked
    assert sender.leave([server], 10.0) == {} and sender.leave([server], 10.0) == {}

    async def twice() -> None:
        async with ServerClient(server) as client:
            await client.destroy_group(group)

    with pytest.raises(ServerError, match="does not exist"):
        asyncio.run(twice())
    # Who comes back is in a group with it again.
    report = buckets.send(HfModel(served.model).buckets, 2, [server])
    assert report is not None and report.ok == ("server 0",)
    sender.close()


def test_cached_prefixes_of_the_old_weights_are_forgotten(served: Pool, sender: Sender) -> None:
    trainer = HfModel(served.model)
    trainer.perturb(3)
    server = served.servers[0].endpoint

    async def cached() -> int:
        async with ServerClient(server) as client:
            await client.generate([9] * 20, Sampling(1))
            return (await client.generate([9] * 20, Sampling(1))).cached_tokens

    async def cached_after() -> int:
        async with ServerClient(server) as client:
            return (await client.generate([9] * 20, Sampling(1))).cached_tokens

    assert asyncio.run(cached()) > 0
    sender.send(trainer.buckets, 3, [server])
    assert asyncio.run(cached_after()) == 0


def test_one_wrong_weight_is_found_out(served: Pool, sender: Sender) -> None:
    trainer = HfModel(served.model)
    trainer.perturb(4)
    name = "model.layers.1.self_attn.q_proj.weight"

    def wrong() -> Iterator[Bucket]:
        for bucket in trainer.buckets():
            yield [(key, tensor.flip(0) if key == name else tensor) for key, tensor in bucket]

    report = sender.send(wrong, 4, [served.servers[0].endpoint])
    assert report is not None
    assert report.ok == ("server 0",)
    with pytest.raises(SyncError, match=r"Weight version 4 did not arrive .* server 0"):
        difference(served, trainer, 4)


async def paused(
    client: ServerClient, generate: Callable[[], Coroutine[Any, Any, Generation]], mode: Literal["in_place", "retract"]
) -> asyncio.Task[Generation]:
    """A request that its server holds; another one where it had ended before the server was told, as on a busy machine."""
    for _ in range(TRIES):
        running = await begun(client, generate)
        await client.pause(mode)
        ended, _ = await asyncio.wait([running], timeout=0.3)
        if not ended:
            return running
        await client.resume()
    raise AssertionError(f"{TRIES} requests in a row had ended before the pause")


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_request_that_a_sync_held_goes_on_with_the_new_weights_from_the_token_that_its_spans_say(
    served: Pool, sender: Sender, mode: Literal["in_place", "retract"]
) -> None:
    prompt, longest = [5, 6, 7, 8], 400
    old, new = HfModel(served.model), HfModel(served.model)
    new.perturb(5)
    server = served.servers[0].endpoint

    async def go() -> tuple[Generation, Generation]:
        async with ServerClient(server) as client:
            await client.flush_cache(10.0)
            running = await paused(client, lambda: client.generate(prompt, Sampling(longest, 0.0)), mode)
            try:
                waiting = asyncio.create_task(client.generate([9, 9], Sampling(4, 0.0)))
                # Flushing would end a server that holds requests in place.
                flush = mode == "retract"
                report = await asyncio.to_thread(sender.send, new.buckets, 6, [server], flush_cache=flush)
                assert report is not None and report.failed == {}
                assert not running.done() and not waiting.done()
            finally:
                await client.resume()
            return await running, await waiting

    held, queued = asyncio.run(go())
    assert [span.version for span in queued.versions] == [6]
    assert len(held.token_ids) == longest and held.finish == "length"
    first, second = held.versions
    assert (first.version, first.start, second.version, second.end) == (0, 0, 6, longest)
    at = first.end
    assert 20 <= at == second.start < longest
    whole = [*prompt, *held.token_ids.tolist()]
    by_old, by_new = (model.logprobs(whole)[len(prompt) - 1 :] for model in (old, new))
    np.testing.assert_allclose(held.logprobs[:at], by_old[:at], atol=1e-5)
    assert abs(held.logprobs[at] - by_old[at]) > 1e-3
    if mode == "retract":
        np.testing.assert_allclose(held.logprobs[at:], by_new[at:], atol=1e-5)
    else:  # it goes on with the KV of the old weights
        assert abs(held.logprobs[at] - by_new[at]) > 1e-4
