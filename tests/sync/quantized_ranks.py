"""A trainer's rank that broadcasts in FP8, for test_quantized: sends its model at one layout after the other.

Its arguments: <rank> <file of a Job as JSON>
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.core.layout import Layout
from megarl.models.parts import first_copy
from megarl.serving.client import ServerEndpoint
from megarl.sync.sending import Sending
from megarl.sync.transport import make_transport
from megarl.training.rank import Rank
from megarl.training.spec import RoleSpec
from tests.support.platforms import chosen

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Job:
    """layout: as `Layout` takes it. servers: (name, URL)."""

    port: int
    layout: dict[str, Any]
    model: str
    servers: list[tuple[str, str]]
    registry: str
    bucket_bytes: int


def main() -> None:
    """One sync."""
    job = Job(**json.loads(Path(sys.argv[2]).read_text()))
    layout = Layout(**job.layout)
    rank = Rank(int(sys.argv[1]), layout.world_size, chosen().name, seed=1)
    rank.rendezvous("127.0.0.1", job.port, TIMEOUT_S)
    rank.build("actor", RoleSpec(Path(job.model), "bfloat16", layout=layout))
    nodes = (0,) * layout.world_size
    sending = Sending(
        "broadcast",
        first_copy(layout),
        nodes,
        (Path(job.registry),) * layout.world_size,
        job.bucket_bytes,
        TIMEOUT_S,
        quantized=True,
    )
    transport = make_transport(sending, rank=rank.rank, host="127.0.0.1", platform=chosen(), control=rank.everyone())
    report = transport.send(rank.engine("actor"), 1, [ServerEndpoint(name, url, "key") for name, url in job.servers])
    transport.close()
    rank.close()
    if rank.rank == 0:
        assert report is not None and report.failed == {}, report
        print(json.dumps({"num_bytes": report.num_bytes}), flush=True)
