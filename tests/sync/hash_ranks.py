"""What each rank does for test_hashes: sends models at one layout after the other, and holds servers to them by hash.

Its arguments: <rank> <file of a Job as JSON>
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.core.layout import Layout
from megarl.models.parts import first_copy
from megarl.recipe.roles import Optimizer
from megarl.serving.client import ServerEndpoint
from megarl.sync.fetch import Fetched, Fetcher, Order
from megarl.sync.hash_report import HashReport
from megarl.sync.hashes import compare
from megarl.sync.plan import Receiver
from megarl.sync.sending import Sending, Versions
from megarl.sync.store import Store
from megarl.sync.transport import make_transport
from megarl.training.rank import Rank
from megarl.training.spec import RoleSpec, SftObjective
from tests.support.hashes import differing
from tests.support.platforms import chosen

ROWS = "rows.jsonl"
DEVICES = "devices"  # shared memory, a piece for each device
BUCKET_BYTES = 1 << 16
TIMEOUT_S = 60.0
LEARNS = Optimizer(name="sgd", freeze_vision_tower=False)


@dataclass(frozen=True)
class Job:
    """layouts: as `Layout` takes them, tried one by one. transports: those of each. models: two of the same config, in turn.

    servers: of ServerEndpoint. root: for what is exported, weight versions and the registry of shared memory; what was seen goes
    there, a line a sync (`ROWS`). tower: models see, and their towers learn.
    """

    port: int
    world_size: int
    layouts: list[dict[str, Any]]
    transports: list[list[str]]
    models: list[str]
    servers: list[dict[str, Any]]
    root: str
    tower: bool = False

    def write(self, file: Path) -> Path:
        file.write_text(json.dumps(asdict(self)))
        return file


def check(job: Job, rank: Rank, layout: Layout, transport_name: str, model: Path) -> None:
    """One sync: the servers hold something else before it, and the export bit for bit behind it."""
    servers = [ServerEndpoint(**each) for each in job.servers]
    platform, folder = chosen(), Path(job.root)
    spec = RoleSpec(model, "float32", layout=layout)
    rank.build("actor", replace(spec, optimizer=LEARNS, objective=SftObjective()) if job.tower else spec)
    store = Store(Path(tempfile.mkdtemp(dir=folder)), "model") if rank.rank == 0 else Store(folder, "model")
    [store] = everywhere(rank, store)
    # Memory of processes stands for that of devices: a rank beside each rank of each server, from the last one on.
    beside = tuple(
        Receiver(
            server.name,
            (0,) * server.tp,
            tuple((layout.world_size - 1 - index) % layout.world_size for index in range(server.tp)),
        )
        for server in servers
    )
    sending = Sending(
        "shared_memory" if transport_name == DEVICES else transport_name,  # type: ignore[arg-type]
        first_copy(layout),
        (0,) * layout.world_size,
        (folder / "registry",) * layout.world_size,
        BUCKET_BYTES,
        TIMEOUT_S,
        versions=Versions(store, whole_bytes=1 << 20, in_place=False),
        beside=beside if transport_name == DEVICES else (),
    )
    transport = make_transport(sending, rank=rank.rank, host="127.0.0.1", platform=chosen(), control=rank.everyone())

    def compared() -> HashReport | None:
        buckets = rank.buckets("actor", BUCKET_BYTES)
        if rank.rank == 0:
            config = rank.engine("actor").config
            return compare(buckets, config, servers, "float32", platform, TIMEOUT_S)
        for _ in buckets:
            continue
        return None

    before = compared()
    report = transport.send(rank.engine("actor"), 1, servers)
    fetched = asyncio.run(fetch(servers, store)) if rank.rank == 0 and sending.fetched is not None else {}
    after = compared()
    transport.close()
    exported = folder / f"exported-{layout.world_size}"
    rank.export_hf("actor", model, exported)
    if rank.rank == 0:
        assert before is not None and after is not None and report is not None
        what = f"{layout} by {transport_name}"
        assert set(before.wrong) == {server.name for server in servers}, f"{what}: nothing differed before it"
        assert (report.failed, after.failed, after.wrong) == ({}, {}, {}), f"{what}: {report.failed} {after}"
        assert not any(each.trouble for each in fetched.values()), f"{what}: {fetched}"
        for server in servers:
            assert differing(server, exported, tower=job.tower) == [], f"{what}, to {server.name}"
        row = {"layout": str(layout), "transport": transport_name, "tensors": after.num_tensors}
        with (folder / ROWS).open("a") as rows:
            rows.write(json.dumps(row) + "\n")


def everywhere(rank: Rank, store: Store) -> list[Store]:
    """Rank 0's, on every rank."""
    found = [store]
    if (group := rank.everyone()) is not None:
        dist.broadcast_object_list(found, src=0, group=group)
    return found


async def fetch(servers: list[ServerEndpoint], store: Store) -> dict[str, Fetched]:
    """Have every server load the version that was written."""
    order = Order(store, 1, flush_cache=True, in_place=False, timeout_s=TIMEOUT_S)
    return {server.name: await Fetcher(server).fetch(order) for server in servers}


def main() -> None:
    """Go through all layouts."""
    job = Job(**json.loads(Path(sys.argv[2]).read_text()))
    rank = Rank(int(sys.argv[1]), job.world_size, chosen().name, seed=1)
    # Servers hold what the last row's sync left.
    rows = Path(job.root) / ROWS
    turn = len(rows.read_text().splitlines()) if rows.exists() else 0
    rank.rendezvous("127.0.0.1", job.port, TIMEOUT_S)
    for sizes, transports in zip(job.layouts, job.transports, strict=True):
        for transport in transports:
            check(job, rank, Layout(world_size=job.world_size, **sizes), transport, Path(job.models[turn % 2]))
            turn += 1
    rank.close()
