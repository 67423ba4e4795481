"""A trainer of several ranks, each of which writes buckets of its own; run as `disk_ranks RANK PORT WORLD FOLDER FAILS`.

FAILS: the rank that cannot write its buckets of the third version; -1 is none.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.core.errors import MegarlError
from megarl.sync.disk import DiskSender
from megarl.sync.store import Store
from tests.sync.broadcast_ranks import buckets
from tests.sync.given import Given
from tests.sync.written import names

SENDERS = [2, 0, 1, 1, 0, 2]


def main() -> None:
    rank, port, world_size, folder, fails = int(sys.argv[1]), *sys.argv[2:4], Path(sys.argv[4]), int(sys.argv[5])
    address, timeout = f"tcp://127.0.0.1:{port}", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=int(world_size), timeout=timeout)
    sender = DiskSender(rank=rank, store=Store(folder, "tiny"), whole_bytes=0, control=dist.group.WORLD)
    told: list[Any] = []
    for version in (1, 2, 3, 4):
        given = Given(buckets(version), lambda _: dist.barrier(), rank=rank, senders=SENDERS)
        if version == 3 and rank == fails:
            sender._write = _cannot  # type: ignore[method-assign]
        try:
            report = sender.write(given, names(len(SENDERS)), version)
            told.append(None if report is None else asdict(report))
        except (MegarlError, OSError) as error:
            told.append(f"{type(error).__name__}: {error}")
            vars(sender).pop("_write", None)
    (folder / f"rank-{rank}.json").write_text(json.dumps(told))
    sender.close()
    dist.destroy_process_group()


def _cannot(*_: Any) -> Any:
    raise OSError("the disk is gone")


if __name__ == "__main__":
    main()
