"""Several ranks that each send their own buckets, to fake servers that really receive over gloo."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megarl.core.ports import free_port
from tests.support.forked_ranks import Ranks, forked_ranks
from tests.sync.broadcast_ranks import NUM_BUCKETS, Job, buckets
from tests.sync.receiver import Receiver
from tests.sync.test_broadcast import serving


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with forked_ranks() as started:
        yield started


def reports(ranks: Ranks, folder: Path, senders: list[int], *receivers: Receiver, **more: Any) -> list[dict[str, Any]]:
    world_size = max(senders) + 1
    result, job = folder / "result.json", folder / "job.json"
    servers = [(receiver.name, receiver.endpoint.url) for receiver in receivers]
    given = Job(free_port(), world_size, senders, servers, str(result), **{"helped": [], **more})
    job.write_text(json.dumps(asdict(given)))
    said = ranks.run("tests.sync.broadcast_ranks", world_size, job, log=folder / "ranks.log", deadline_s=120)
    assert said == ""
    found: list[dict[str, Any]] = json.loads(result.read_text())
    return found


def holds(receiver: Receiver, version: int) -> bool:
    expected = {name: tensor for bucket in buckets(version) for name, tensor in bucket}
    return receiver.version == str(version) and all(
        receiver.weights[name].equal(tensor) for name, tensor in expected.items()
    )


@pytest.mark.parametrize("senders", [[0, 1, 0, 1, 0, 1], [1] * 6, [2, 0, 1, 1, 0, 2], [0, 0, 0, 3, 3, 3]])
@pytest.mark.parametrize("helped", [[], [0, 1]])
def test_every_rank_sends_its_own_buckets_to_all_servers(
    ranks: Ranks, tmp_path: Path, senders: list[int], helped: list[int]
) -> None:
    one, two = Receiver("server 0"), Receiver("server 1")
    with serving(one, two):
        for report in reports(ranks, tmp_path, senders, one, two, helped=helped):
            assert report["failed"] == {}, json.dumps(report)
            assert (report["ok"], report["attempts"]) == (["server 0", "server 1"], 1)
        assert holds(one, 2) and holds(two, 2)
        # One group a sender, kept from version to version; all servers heard of the buckets in one order.
        assert len(one.bodies("/init_weights_update_group")) == len(set(senders))
        orders = [
            [body["group_name"].rpartition("-")[2] for body in each.bodies("/update_weights_from_distributed")]
            for each in (one, two)
        ]
        assert orders[0] == orders[1] == [str(sender) for sender in senders] * 2


@pytest.mark.parametrize("bucket", range(1, NUM_BUCKETS + 1))
def test_a_server_that_refuses_a_bucket_of_any_sender_is_named_and_the_other_is_updated(
    ranks: Ranks, tmp_path: Path, bucket: int
) -> None:
    well, ill = Receiver("server 0"), Receiver("server 1")
    ill.refuse_bucket = bucket
    with serving(well, ill):
        [report] = reports(ranks, tmp_path, [0, 1, 2, 0, 1, 2], well, ill, versions=1)
        assert (report["ok"], list(report["failed"])) == (["server 0"], ["server 1"])
        assert "out of memory" in report["failed"]["server 1"]
        assert holds(well, 1)


@pytest.mark.parametrize("bucket", [1, 2, 6])
def test_a_server_that_never_joins_a_broadcast_of_any_sender_is_named(
    ranks: Ranks, tmp_path: Path, bucket: int
) -> None:
    well, ill = Receiver("server 0"), Receiver("server 1")
    ill.hang_bucket = bucket
    with serving(well, ill):
        [report] = reports(ranks, tmp_path, [0, 1, 0, 1, 0, 1], well, ill, versions=1)
        assert (report["ok"], list(report["failed"])) == (["server 0"], ["server 1"])
        assert holds(well, 1)


def test_a_server_that_does_not_join_the_second_senders_group_is_named(ranks: Ranks, tmp_path: Path) -> None:
    well, ill = Receiver("server 0"), Receiver("server 1")
    ill.refuse_group = 2
    with serving(well, ill):
        [report] = reports(ranks, tmp_path, [0, 1, 2, 0, 1, 2], well, ill, versions=1)
        assert (report["ok"], list(report["failed"])) == (["server 0"], ["server 1"])
        assert holds(well, 1)


class Released(Receiver):
    """What was begun before is undone before each sync: the pool does that to a server that somebody else started."""

    async def respond(self, path: str, body: dict[str, Any]) -> web.Response:
        self.session = self.session and path != "/begin_weight_update"
        return await super().respond(path, body)


def test_a_server_that_failed_alone_is_joined_anew_by_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """A rank that was done with it had nothing to leave its group for; rank 0 had."""
    one = Released("server 0")
    one.refuse_bucket = NUM_BUCKETS
    with serving(one):
        first, second = reports(ranks, tmp_path, [1, 1, 1, 0, 0, 0], one)
        assert (first["ok"], list(first["failed"])) == ([], ["server 0"])
        assert (second["ok"], second["failed"]) == (["server 0"], {})
        assert holds(one, 2)
