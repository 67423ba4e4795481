"""Weights over the disk, from several ranks that write to servers that really read, each beside what fetches for it."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file
from torch import Tensor

from megarl.core.ports import free_port
from megarl.serving.client import ServerEndpoint
from megarl.sync.disk import _content
from megarl.sync.fetch import Fetcher, Order
from megarl.sync.mirror import Mirror
from megarl.sync.store import MANIFEST, Store
from tests.support.fake_sglang import FakeSglang
from tests.support.forked_ranks import Ranks, forked_ranks
from tests.sync.broadcast_ranks import buckets
from tests.sync.written import DiskBuckets

Model = dict[str, Tensor]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with forked_ranks() as started:
        yield started


def written(ranks: Ranks, folder: Path, fails: int = -1) -> list[list[Any]]:
    """What each rank was told of its four versions."""
    said = ranks.run(
        "tests.sync.disk_ranks", 3, free_port(), 3, folder, fails, log=folder / "ranks.log", deadline_s=120
    )
    assert said == ""
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(3)]


def holds(folder: Path, version: int) -> bool:
    found: Model = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    expected = {name: tensor for bucket in buckets(version) for name, tensor in bucket}
    return found.keys() == expected.keys() and all(found[name].equal(tensor) for name, tensor in expected.items())


def test_every_rank_writes_its_own_buckets_of_one_version(ranks: Ranks, tmp_path: Path) -> None:
    lead, *others = written(ranks, tmp_path)
    assert others == [[None] * 4] * 2
    store = Store(tmp_path, "tiny")
    assert [report["version"] for report in lead] == store.versions() == [1, 2, 3, 4]
    assert [store.manifest(version).base for version in (1, 2, 3, 4)] == [None, 1, 2, 3]
    assert [report["num_bytes"] for report in lead] == [store.manifest(version).num_bytes for version in (1, 2, 3, 4)]
    assert holds(Mirror(tmp_path / "node", store).bring(4, time.monotonic() + 60), 4)


@pytest.mark.parametrize("fails", [0, 2])
def test_a_rank_that_cannot_write_fails_the_version_on_all_and_the_next_is_whole(
    ranks: Ranks, tmp_path: Path, fails: int
) -> None:
    for rank, told in enumerate(written(ranks, tmp_path, fails)):
        assert "the disk is gone" in told[2] and told[2].startswith("OSError" if rank == fails else "SyncError")
        assert told[3] is None if rank else told[3]["version"] == 4
    store = Store(tmp_path, "tiny")
    assert store.versions() == [4] and store.manifest(4).base is None
    assert holds(Mirror(tmp_path / "node", store).bring(4, time.monotonic() + 60), 4)


class Reader(FakeSglang):
    """Loads what is in the folder that it is told, and leaves the rest as it is."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.weights: Model = {}
        self.version = ""

    async def respond(self, path: str, body: dict[str, Any]) -> web.Response:
        if path == "/update_weights_from_disk":
            for file in Path(body["model_path"]).glob("*.safetensors"):
                self.weights |= load_file(file)
            self.version = body["weight_version"]
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        return await super().respond(path, body)

    @property
    def loads(self) -> list[dict[str, Any]]:
        return self.bodies("/update_weights_from_disk")


@asynccontextmanager
async def reading(*readers: Reader) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for reader in readers:
            await stack.enter_async_context(reader)
        yield


def models() -> list[Model]:
    """Three versions: the second changes one bucket, the third nothing."""
    first = {"a": torch.arange(1000.0), "b": torch.ones(2000).bfloat16(), "c": torch.zeros(500)}
    second = {**first, "b": first["b"] * 1.01}
    return [first, second, second]


async def write(disk: DiskBuckets, model: Model, version: int) -> None:
    await asyncio.to_thread(disk.send, lambda: iter([[item] for item in model.items()]), version, [])


def has(reader: Reader, model: Model, version: int) -> bool:
    return reader.version == str(version) and all(reader.weights[name].equal(model[name]) for name in model)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskBuckets]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = DiskBuckets(tmp_path, timeout_s=5.0, model="Qwen3-4B")
    yield made
    made.close()


def test_a_server_loads_all_then_what_changed_and_all_again_once_its_memory_is_lost(disk: DiskBuckets) -> None:
    async def go() -> None:
        one, late = Reader("server 0"), Reader("server 1")
        async with reading(one, late):
            for version, model in enumerate(models(), start=1):
                await write(disk, model, version)
                assert not (await disk.fetch(version, [one.endpoint], flush_cache=version != 2))["server 0"].trouble
                assert has(one, model, version)
            # The whole, then one of three files; then only the version.
            folders = [Path(body["model_path"]) for body in one.loads]
            assert [body["flush_cache"] for body in one.loads] == [True, False]
            assert all(body["load_format"] == "safetensors" for body in one.loads)
            assert [folder.name for folder in folders] == ["Qwen3-4B"] * 2, "servers call their model after it"
            # One that joins now, and one whose weights are gone, load all three files.
            disk.fetchers[one.endpoint.url].forget()
            one.weights = {}
            told = await disk.fetch(3, [one.endpoint, late.endpoint])
            assert not any(each.trouble for each in told.values())
            assert has(one, models()[2], 3) and has(late, models()[2], 3)

    asyncio.run(go())


def test_a_server_of_quantised_weights_loads_all_files_each_time(disk: DiskBuckets) -> None:
    async def go() -> None:
        one = Reader("server 0")
        async with reading(one):
            fetcher = Fetcher(one.endpoint)
            for version, model in enumerate(models()[:2], start=1):
                await write(disk, model, version)
                order = Order(disk.store, version, flush_cache=True, in_place=False, timeout_s=5.0, all_files=True)
                assert not (await fetcher.fetch(order)).trouble
                one.weights = {} if version == 1 else one.weights
            assert has(one, models()[1], 2)

    asyncio.run(go())


def test_servers_that_fail_are_named_and_load_all_once_they_are_back(disk: DiskBuckets) -> None:
    async def go() -> None:
        well, ill, frozen = Reader("server 0"), Reader("server 1"), Reader("server 2")
        servers = [well, ill, frozen]
        async with reading(*servers):
            endpoints = [server.endpoint for server in servers]
            await write(disk, models()[0], 1)
            await disk.fetch(1, endpoints)
            await write(disk, models()[1], 2)
            ill.refuse["/update_weights_from_disk"] = (400, "out of memory")
            frozen.hang.add("/update_weights_from_disk")
            told = await disk.fetch(2, endpoints)
            assert not told["server 0"].trouble and has(well, models()[1], 2)
            assert "server 1" in told["server 1"].trouble and "out of memory" in told["server 1"].trouble
            assert "server 2" in told["server 2"].trouble and "no answer within" in told["server 2"].trouble
            assert not any(each.torn for each in told.values())
            ill.refuse.clear()
            ill.weights = {}  # nobody knows what it has
            assert not (await disk.fetch(2, [ill.endpoint]))["server 1"].trouble
            assert has(ill, models()[1], 2)

    asyncio.run(go())


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("what", ["flipped", "cut off", "no manifest"])
def test_a_torn_version_reaches_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, in_place: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    disk = DiskBuckets(tmp_path, in_place=in_place)

    async def go() -> None:
        one = Reader("server 0")
        async with reading(one):
            for version, model in enumerate(models()[:2], start=1):
                await write(disk, model, version)
                if version == 1:
                    await disk.fetch(1, [one.endpoint])
            path = max(disk.store.files(2).iterdir())
            content = path.read_bytes()
            if what == "flipped":
                path.write_bytes(content[:-1] + bytes([content[-1] ^ 16]))
            elif what == "cut off":
                path.write_bytes(content[:-1])
            else:
                path = disk.store.files(2).parent / MANIFEST
                path.unlink()
            told = (await disk.fetch(2, [one.endpoint]))["server 0"]
            assert told.torn and "Weight version 2 is torn" in told.trouble and str(path) in told.trouble
            assert len(one.loads) == 1 and has(one, models()[0], 1)
            # It is written once more, and whole.
            await write(disk, models()[1], 2)
            assert disk.store.manifest(2).base is None
            assert not (await disk.fetch(2, [one.endpoint]))["server 0"].trouble and has(one, models()[1], 2)

    asyncio.run(go())
    disk.close()


def test_servers_elsewhere_read_whole_versions_where_they_were_written(tmp_path: Path) -> None:
    disk = DiskBuckets(tmp_path, in_place=True, model="Qwen3-4B")

    async def go() -> None:
        one = Reader("external server 0")
        async with reading(one):
            for version, model in enumerate(models(), start=1):
                await write(disk, model, version)
                assert disk.store.versions() == [version] and disk.store.manifest(version).base is None
                assert not (await disk.fetch(version, [one.endpoint]))["external server 0"].trouble
                assert has(one, model, version) and Path(one.loads[-1]["model_path"]) == disk.store.files(version)
            one.refuse["/update_weights_from_disk"] = (400, "Cannot find any model weights")
            told = (await disk.fetch(3, [one.endpoint]))["external server 0"]
            assert "Cannot find any model weights" in told.trouble and "(sync.folder)" in told.trouble and not told.torn

    asyncio.run(go())
    disk.close()


def test_a_node_that_does_not_see_a_version_whole_says_so(tmp_path: Path) -> None:
    disk = DiskBuckets(tmp_path, in_place=True, model="Qwen3-4B")
    beside = Fetcher(ServerEndpoint("sglang server 0 part 1", "http://h:1", "key"))
    disk.send(lambda: iter([[item] for item in models()[0].items()]), 1, [])
    order = Order(disk.store, 1, flush_cache=True, in_place=True, timeout_s=5.0)
    assert asyncio.run(beside.sees(order)) == ""
    told = asyncio.run(beside.sees(replace(order, store=Store(tmp_path / "elsewhere", "Qwen3-4B"))))
    assert told.startswith("sglang server 0 part 1 on ") and f"has to see {tmp_path / 'elsewhere'} under" in told
    next(disk.store.files(1).iterdir()).unlink()
    assert "(sync.folder). Weight version 1 is torn" in asyncio.run(beside.sees(order))
    disk.close()


def test_a_disk_that_does_not_answer_is_given_up(disk: DiskBuckets, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*_: Any) -> None:
        time.sleep(3)

    async def go() -> None:
        one = Reader("server 0")
        async with reading(one):
            await write(disk, models()[0], 1)
            monkeypatch.setattr("megarl.sync.fetch._folder", hangs)
            disk._timeout_s = 0.3
            told = (await disk.fetch(1, [one.endpoint]))["server 0"]
            assert "server 0: weight version 1 was not read from" in told.trouble and one.loads == []

    asyncio.run(go())


def test_a_role_can_free_what_was_written() -> None:
    weight = torch.arange(64.0)
    assert _content(weight)[:8].tobytes() == bytes(6) + b"\x80\x3f"  # 0.0 and 1.0
    weight.untyped_storage().resize_(0)
