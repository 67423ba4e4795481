"""Servers that are really killed or stopped, in one pool of two, in this order: each test leaves it a little more broken."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from megarl.core import janitor
from megarl.models.hf_pieces import size_of
from megarl.serving.answers import Generation
from megarl.serving.client import ServerClient, ServerEndpoint
from megarl.serving.sampling import Sampling
from megarl.sync.broadcast import BroadcastSender
from megarl.sync.ring import ring_bytes, turns
from megarl.sync.verify import probe_servers, verify
from tests.support.processes import ended
from tests.support.served import KEY, NEEDS, HfModel
from tests.sync.given import BroadcastBuckets, Given
from tests.sync.written import DiskBuckets, SharedBuckets, Written

pytestmark = [pytest.mark.slow, pytest.mark.needs(*NEEDS)]

PROBE = [[5, 6, 7, 8, 9, 10], [40, 30, 20]]
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Faulty:
    """A pool whose parent is another process. Index 2 is the router."""

    parent: subprocess.Popen[str]
    folder: Path
    run_id: str
    model: Path
    pids: list[int]
    trees: list[list[int]]
    segments: list[list[str]]
    endpoints: list[ServerEndpoint]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    folder = tmp_path_factory.mktemp("faulty")
    run_id = secrets.token_hex(8)
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.sync.faulty_pool", str(folder)],
        env={**os.environ, janitor.RUN_ID_VARIABLE: run_id},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    line = parent.stdout.readline()
    while line and not line.startswith("{"):
        line = parent.stdout.readline()
    facts = json.loads(line)
    names = ("server 0", "server 1", "router")
    endpoints = [ServerEndpoint(name, url, KEY) for name, url in zip(names, facts["urls"], strict=True)]
    yield Faulty(
        parent,
        folder,
        run_id,
        Path(facts["model"]),
        facts["pids"],
        facts["trees"],
        facts["segments"],
        endpoints,
    )
    parent.stdin.close()
    parent.wait(60)
    parent.stdout.close()
    janitor.clean(run_id, folder / "registry")


def check(faulty: Faulty, servers: list[ServerEndpoint], trainer: HfModel, version: int) -> None:
    answers = asyncio.run(probe_servers(servers, PROBE, 60.0))
    assert not answers.failed
    assert verify([trainer.logprobs(row) for row in PROBE], answers.logprobs, 1e-4, version) < 1e-5


def freezing(faulty: Faulty, number: int) -> None:
    """The second server stands still once a bucket has gone."""
    if number == 1:
        for pid in faulty.trees[1]:
            os.kill(pid, signal.SIGSTOP)


def test_a_server_that_freezes_while_it_loads_is_named_and_the_other_goes_on(faulty: Faulty) -> None:
    trainer = HfModel(faulty.model)
    trainer.perturb(7)

    shared = SharedBuckets(faulty.folder / "registry", join_s=2.0).sender
    began = time.monotonic()
    report = shared.send(Written(list(trainer.buckets()), partial(freezing, faulty)), 7, faulty.endpoints[:2])
    assert time.monotonic() - began < 45
    for pid in faulty.trees[1]:
        os.kill(pid, signal.SIGCONT)
    assert report is not None
    assert (report.ok, list(report.failed), report.attempts) == (("server 0",), ["server 1"], 1)
    check(faulty, faulty.endpoints[:1], trainer, 7)

    async def as_it_was() -> None:
        async with ServerClient(faulty.endpoints[1]) as client:
            await client.end_weight_update()

    asyncio.run(as_it_was())
    shared.close()


def test_a_server_that_freezes_with_a_version_on_the_disk_is_named_and_the_other_has_it(
    faulty: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trainer, disk = HfModel(faulty.model), DiskBuckets(tmp_path, timeout_s=5.0)

    def freeze() -> None:
        for pid in faulty.trees[1]:
            os.kill(pid, signal.SIGSTOP)

    trainer.perturb(8)
    report = disk.send(trainer.buckets, 8, faulty.endpoints[:2])
    assert report is not None and report.ok == ("server 0", "server 1")
    trainer.perturb(9)
    disk.between = freeze
    report = disk.send(trainer.buckets, 9, faulty.endpoints[:2])
    for pid in faulty.trees[1]:
        os.kill(pid, signal.SIGCONT)
    assert report is not None
    assert (report.ok, list(report.failed)) == (("server 0",), ["server 1"])
    check(faulty, faulty.endpoints[:1], trainer, 9)
    # It goes on, and whatever it has by now, it loads all of it.
    disk.between = lambda: None
    report = disk.send(trainer.buckets, 10, faulty.endpoints[:2])
    assert report is not None and report.failed == {} and disk.store.manifest(10).base == 9
    check(faulty, faulty.endpoints[:2], trainer, 10)
    disk.close()


def test_a_server_that_freezes_in_a_sync_is_named_and_the_other_is_updated(faulty: Faulty) -> None:
    trainer = HfModel(faulty.model)
    trainer.perturb(1)

    sender = BroadcastSender(
        rank=0, host="127.0.0.1", device="cpu", backend="gloo", timeout_s=60.0, grace_s=2.0, join_s=2.0
    )
    report = sender.send(Given(list(trainer.buckets()), partial(freezing, faulty)), 1, faulty.endpoints[:2])
    for pid in faulty.trees[1]:
        os.kill(pid, signal.SIGCONT)
    assert report is not None
    assert report.ok == ("server 0",)
    assert list(report.failed) == ["server 1"]
    assert report.seconds < 45
    check(faulty, faulty.endpoints[:1], trainer, 1)
    sender.close()


def router_says(faulty: Faulty, url: str) -> dict[str, Any]:
    """What the router knows of one server."""
    router = faulty.endpoints[2]
    request = Request(f"{router.url}/workers", headers={"Authorization": f"Bearer {KEY}"})
    with urlopen(request, timeout=10) as answer:
        known: list[dict[str, Any]] = json.load(answer)["workers"]
    return next(worker for worker in known if worker["url"] == url)


def wait_until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    """Ask again and again: the router does not tell by itself."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end


def test_requests_are_answered_although_a_server_is_killed(faulty: Faulty) -> None:
    doomed = faulty.endpoints[1].url
    wait_until(lambda: bool(router_says(faulty, doomed)["is_healthy"]))

    async def go() -> list[Generation]:
        killed = asyncio.Event()

        async def asking(client: ServerClient, first: int) -> Generation:
            """The answer to the last request, which the server's end finds on its way; one alone may be done before it."""
            while True:
                result = await client.generate([first, 6, 7], Sampling(1000), 120.0)
                if killed.is_set():
                    return result

        async with ServerClient(faulty.endpoints[2]) as client:
            requests = [asyncio.create_task(asking(client, 5 + i)) for i in range(24)]
            await asyncio.to_thread(wait_until, lambda: router_says(faulty, doomed)["load"] >= 6)
            killed.set()
            os.kill(faulty.pids[1], signal.SIGKILL)
            return await asyncio.gather(*requests)

    results = asyncio.run(go())
    assert all(len(result.token_ids) == len(result.logprobs) > 0 for result in results)
    # Version 1 is the surviving server's; the other was still at 0 when the sync before took it out.
    versions = [{span.version for span in result.versions} for result in results]
    assert len(versions) == 24
    assert versions.count({1}) >= 18


def test_a_killed_servers_processes_end_with_it(faulty: Faulty) -> None:
    assert ended(faulty.trees[1], within_s=10)


def test_a_dead_server_in_a_sync_is_named_and_the_other_is_updated(faulty: Faulty) -> None:
    trainer = HfModel(faulty.model)
    trainer.perturb(2)
    sender = BroadcastBuckets()
    report = sender.send(trainer.buckets, 2, faulty.endpoints[:2])
    assert report is not None
    assert report.ok == ("server 0",)
    assert list(report.failed) == ["server 1"]
    check(faulty, faulty.endpoints[:1], trainer, 2)
    sender.close()


def test_a_server_that_is_dead_when_a_version_is_on_the_disk_is_named_at_once(
    faulty: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trainer, disk = HfModel(faulty.model), DiskBuckets(tmp_path)
    trainer.perturb(11)
    report = disk.send(trainer.buckets, 11, faulty.endpoints[:2])
    assert report is not None and report.ok == ("server 0",) and "no answer" in report.failed["server 1"]
    check(faulty, faulty.endpoints[:1], trainer, 11)
    disk.close()


def test_a_server_killed_while_it_loads_is_named_at_once(faulty: Faulty) -> None:
    """The last one: nothing is written over what it was asked to load, and the memory is still nobody's but the sender's."""
    written: list[int] = []

    def killing(number: int) -> None:
        written.append(number)
        if number == 1:
            os.kill(faulty.pids[0], signal.SIGKILL)

    buckets = 4 * list(HfModel(faulty.model).buckets(4))
    shared = SharedBuckets(faulty.folder / "registry", bucket_bytes=1)
    pieces = Written(buckets, killing)
    report = shared.sender.send(pieces, 8, faulty.endpoints[:1])
    assert report is not None and report.ok == () and report.seconds < 30
    assert "no answer" in report.failed["server 0"]
    # It may have loaded the first before it died. What lies beside the second in memory may be written until its death is told.
    sizes = [size_of(bucket) for bucket in pieces.buckets]
    over_the_second = next(
        number for number, turn in enumerate(turns(sizes, ring_bytes(max(sizes), 1))) if (turn.after or 0) >= 1
    )
    assert written == list(range(len(written))) and 2 <= len(written) <= over_the_second
    shared.close()


def test_nothing_is_left_when_the_parent_is_killed(faulty: Faulty) -> None:
    assert any((SHARED_MEMORY / name).exists() for names in faulty.segments for name in names)
    faulty.parent.kill()
    faulty.parent.wait()
    everyone = [pid for tree in faulty.trees for pid in tree]
    assert ended(everyone, within_s=10)
    # What outlives its processes is the run's janitor's; it knows the names.
    janitor.clean(faulty.run_id, faulty.folder / "registry")
    assert janitor.processes_of(faulty.run_id) == []
    assert not [name for names in faulty.segments for name in names if (SHARED_MEMORY / name).exists()]
    for endpoint in faulty.endpoints:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(endpoint.url.rpartition(":")[2]))) != 0
