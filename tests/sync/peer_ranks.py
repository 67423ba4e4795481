"""Two ranks that gather in memory that they share, until the second is killed; for test_peer_memory.

Its arguments: <rank> <port> <folder>
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.core.errors import DeadlineError
from megarl.models.hf_gather import Gatherer, Places
from megarl.sync.peer_memory import PeerMemory
from megarl.sync.segments import Segment
from tests.models.test_hf_gather import gatherer, rule
from tests.support.whole_tensors import merge

WAITED_S = 5.0
TENSOR = "columns"


def made(rank: int) -> Gatherer:
    """A rank's end, with its columns of a tensor."""
    of = rule(TENSOR, (4, 4), "columns")
    link: Any = dist.group.WORLD
    return gatherer(rank, [of], {TENSOR: merge(of, [torch.arange(16.0).view(4, 4)], rank, 2)}, link)


def main() -> None:
    """Once with both, and once without the second."""
    rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=WAITED_S)
    )
    peers = PeerMemory(
        rank=rank,
        make=lambda num_bytes: Segment.make(num_bytes, folder / "registry"),
        open_=Segment.open,
        control=dist.group.WORLD,
        is_kept=True,
    )
    peers.take({0: 64, 1: 64}, {0: frozenset({1}), 1: frozenset({0})})
    memory, mine = peers.of(0), made(rank)
    assert memory is not None
    places = Places({0: {TENSOR: memory.view(torch.float32).view(4, 4)}}, {0: peers.writers(0)})
    found = mine.gather({0: [(TENSOR, (0, 1))]}, places)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    [(_, before)] = [(name, tensor.clone()) for name, tensor in found]
    began = time.monotonic()
    try:
        mine.gather({0: [(TENSOR, (0, 1))]}, places)
    except DeadlineError as error:
        told = {"error": str(error), "seconds": time.monotonic() - began, "before": before.tolist()}
        (folder / "told.json").write_text(json.dumps(told))
    peers.close()


if __name__ == "__main__":
    main()
