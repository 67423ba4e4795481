"""A trainer of several ranks, each of which sends buckets of its own; run as `broadcast_ranks RANK JOB`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.models.hf_weights import Bucket
from megarl.serving.client import ServerEndpoint
from megarl.sync.broadcast import BroadcastSender
from tests.sync.given import Given

NUM_BUCKETS = 6


@dataclass(frozen=True)
class Job:
    """senders: of each bucket. servers: (name, URL). helped: ranks that help every sender. result: where the reports go."""

    port: int
    world_size: int
    senders: list[int]
    servers: list[tuple[str, str]]
    result: str
    helped: list[int]
    versions: int = 2
    timeout_s: float = 30.0


def buckets(version: int) -> list[Bucket]:
    """Every other is of large tensors; of another content in each version."""
    return [
        [
            (f"{number}/{index}", torch.full((1024 * (600 if number % 2 else 3), 1), 100.0 * version + number + index))
            for index in range(2)
        ]
        for number in range(NUM_BUCKETS)
    ]


def main() -> None:
    rank, job = int(sys.argv[1]), Job(**json.loads(Path(sys.argv[2]).read_text()))
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{job.port}",
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=60),
    )
    sender = BroadcastSender(
        rank=rank,
        host="127.0.0.1",
        device="cpu",
        backend="gloo",
        timeout_s=job.timeout_s,
        control=dist.group.WORLD,
        grace_s=3.0,
        join_s=2.0,
    )
    servers = [ServerEndpoint(name, url, "key") for name, url in job.servers]
    reports: list[Any] = []
    for version in range(1, 1 + job.versions):

        def before(number: int) -> None:
            dist.barrier()  # as gathering is: no rank runs ahead of the others

        given = Given(buckets(version), before, rank=rank, senders=job.senders, helped=job.helped)
        reports.append(sender.send(given, version, servers))
    sender.close()
    if rank == 0:
        Path(job.result).write_text(json.dumps([asdict(report) for report in reports]))
    else:
        assert reports == [None] * job.versions
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
