"""The real engines together, without the command line: what one computes, the others compute too."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.cluster.weight_sync import WeightSync
from megarl.core.janitor import RUN_ID_VARIABLE, processes_of
from megarl.recipe.schema import Recipe
from megarl.run.session import TrainSession
from megarl.serving.client import ServerClient, ServerEndpoint
from megarl.serving.sampling import Sampling
from megarl.sync.fetch import Fetched, Order
from megarl.sync.sending import TransportName, Versions
from megarl.sync.store import Store
from tests.end_to_end.engines import one_step, recipe_of, started

pytestmark = pytest.mark.slow

NUM_PROMPTS = 64


@pytest.fixture(scope="module")
def recipe(inputs: Path) -> Recipe:
    overrides = ["rollout.servers=2", "rollout.temperature=0.7", "sync.verify=hash"]
    overrides += ["reference.parallel.pp=2", "reference.parallel.first_stage_layers=1"]
    return recipe_of(inputs, "engines", *overrides)


@pytest.fixture(scope="module")
def session(recipe: Recipe) -> Iterator[TrainSession]:
    """Two ranks, data-parallel for the actor and a pipeline for the reference, and two servers."""
    with started(recipe) as session:
        yield session


def test_rollout_and_trainer_agree_before_and_after_updates(session: TrainSession, tmp_path: Path) -> None:
    assert isinstance(session.sync, WeightSync) and session.sync.sending.transport == "shared_memory"
    ways: tuple[tuple[int, int, TransportName], ...] = (
        (1, 1, "disk"),
        (2, 2, "disk"),
        (3, 3, "broadcast"),
        (4, 4, "shared_memory"),
    )
    for step, version, transport in ways:
        batch, metrics = one_step(session, step, version)
        assert batch.info.num_samples == 16 and batch.info.weight_version == version
        assert metrics["rollout/logprob_diff_max"] < 1e-4
        assert metrics["actor/grad_norm"] > 0
        # Over the disk: whole, then what changed; two servers of one node, which share what is put together there.
        versions = Versions(Store(tmp_path / "versions", "model"), whole_bytes=2**20, in_place=False)
        session.sync.sending = replace(session.sync.sending, transport=transport, versions=versions)
        sync = session.sync.push(version + 1)
        assert transport != "disk" or versions.store.manifest(version + 1).base == (None if version == 1 else version)
        assert sync["sync/probe_diff_max"] < 1e-4
        assert sync["sync/servers"] == 2 and sync["sync/hashed_tensors"] == 36
    # The weights have moved: the reference, which has not, must say something else.
    assert metrics["actor/kl_loss"] > 0


def test_a_version_that_is_torn_is_written_again_and_nobody_has_loaded_it(
    session: TrainSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(session.sync, WeightSync)
    servers, before = session.rollout.servers, session.sync.sending
    versions = Versions(Store(tmp_path / "versions", "model"), whole_bytes=2**20, in_place=False)
    session.sync.sending = replace(before, transport="disk", versions=versions)
    assert session.sync.push(6)["sync/servers"] == 2
    fetch, asked = servers.fetch, []

    def damaged_once(order: Order) -> dict[ServerEndpoint, Fetched]:
        if not asked:
            path = next(versions.store.files(order.version).iterdir())
            path.write_bytes(path.read_bytes()[:-1])
        asked.append(fetch(order))
        return asked[-1]

    monkeypatch.setattr(servers, "fetch", damaged_once)
    _, _ = one_step(session, 6, 6)
    sync = session.sync.push(7)
    first, second = asked
    assert all(each.torn and "Weight version 7 is torn" in each.trouble for each in first.values())
    assert not any(each.trouble for each in second.values()) and versions.store.manifest(7).base is None
    assert sync["sync/servers"] == 2 and sync["sync/probe_diff_max"] < 1e-4
    session.sync.sending = before


def test_exported_greedy_answers_equal_the_pools(session: TrainSession, recipe: Recipe, tmp_path: Path) -> None:
    session.roles["actor"].export(recipe.model.path.resolve(), tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(10, 200, (int(length),), generator=generator).tolist()
        for length in torch.randint(2, 25, (NUM_PROMPTS,), generator=generator)
    ]

    async def ask() -> list[list[int]]:
        async with ServerClient(session.rollout.servers.endpoint) as router:
            sampling = Sampling(max_tokens=16, temperature=0.0)
            answers = await asyncio.gather(*(router.generate(prompt, sampling) for prompt in prompts))
            return [answer.token_ids.tolist() for answer in answers]

    for prompt, answer in zip(prompts, asyncio.run(ask()), strict=True):
        with torch.no_grad():
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :]
        assert answer == expected.tolist()


def test_a_server_that_dies_comes_back_with_the_current_weights(session: TrainSession) -> None:
    """Killed before a sync, which goes on with the other; the next one reaches both."""
    servers = session.rollout.servers
    killed, other = servers.servers
    os.kill(killed.pid, signal.SIGKILL)
    sync = session.sync.push(10)
    assert sync["sync/servers"] == 1 and sync["sync/probe_diff_max"] < 1e-4
    assert servers.servers == [other], "the other was lost in the update, and its processes are being ended"
    session.rollout.samples.waiter.until(lambda: len(servers.receivers()) == 2, "both servers", 120)
    sync = session.sync.push(11)
    assert sync["sync/servers"] == 2 and sync["sync/probe_diff_max"] < 1e-4
    assert sync["rollout/server_restarts"] == 1
    back = [server.worker.name for server in servers.servers]
    assert sorted(back) == ["server 0", "server 1"]
    assert killed.pid not in {server.pid for server in servers.servers}
    batch, metrics = one_step(session, 11, 11)
    assert batch.info.metrics["rollout/failed"] == 0 and metrics["rollout/logprob_diff_max"] < 1e-4


def listeners(url: str) -> list[int]:
    """Processes of the run that listen there."""
    port, run = int(url.rpartition(":")[2]), processes_of(os.environ[RUN_ID_VARIABLE])
    found = (
        row for row in psutil.net_connections("tcp") if row.status == psutil.CONN_LISTEN and row.laddr.port == port
    )
    return [row.pid for row in found if row.pid in run]


def test_a_router_that_dies_is_back_at_its_address(session: TrainSession) -> None:
    url = session.rollout.servers.endpoint.url
    (router,) = listeners(url)
    os.kill(router, signal.SIGKILL)
    batch, _ = one_step(session, 12, 11)
    assert batch.info.num_samples == 16 and batch.info.metrics["rollout/failed"] == 0
    (back,) = listeners(url)
    assert back != router
