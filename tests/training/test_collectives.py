"""What a rank says of its last collectives: of entries of the recorder by hand, and of a real process that is stuck."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.look import collectives_of
from megarl.cluster.nodes import Nodes
from megarl.cluster.process import ProcessFacts, ProcessSpec
from megarl.training.collectives import recorded, told

SECOND = 10**9
STUCK = """
import sys
from datetime import timedelta
from pathlib import Path
from megarl.training.collectives import answer
answer(Path(sys.argv[1]))
import torch, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=100))
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
dist.all_reduce(torch.ones(3, 2))
print("stuck", flush=True)
store.get("what nobody sets")  # no Python runs in this thread meanwhile
"""


def entry(name: str, number: int, *, seconds: float, retired: bool, **more: Any) -> dict[str, Any]:
    return {
        "profiling_name": name,
        "collective_seq_id": number,
        "process_group": ["0", "default_pg"],
        "input_dtypes": ["Float"],
        "input_sizes": [[4]],
        "time_created_ns": int(seconds * SECOND),
        "retired": retired,
        "state": "scheduled",
        **more,
    }


class Recorders:
    """torch's module where it was built with NCCL, which has a recorder of its own."""

    def _dump_fr_trace_json(self) -> str:
        return json.dumps(
            {
                "entries": [
                    entry("gloo:barrier", 1, seconds=1, retired=True),
                    entry("gloo:all_reduce", 2, seconds=3, retired=True),
                ]
            }
        )

    def _dump_nccl_trace_json(self) -> str:
        return json.dumps({"entries": [entry("nccl:broadcast", 1, seconds=2, retired=False)]})


class WithoutNccl:
    def _dump_fr_trace_json(self) -> str:
        return "{}"


def test_both_recorders_are_asked() -> None:
    found = [each["profiling_name"] for each in recorded(Recorders())]
    assert found == ["gloo:barrier", "nccl:broadcast", "gloo:all_reduce"]
    assert recorded(WithoutNccl()) == []


def test_what_has_not_ended_is_told_last() -> None:
    many = [entry("gloo:all_reduce", number, seconds=number, retired=number != 2) for number in range(1, 8)]
    lines = told(many, 10 * SECOND)
    assert [line.partition(" number ")[2].partition(" ")[0] for line in lines] == ["5", "6", "7", "2"]
    assert lines[-1] == "gloo:all_reduce of Float [4], number 2 in group 0 (default_pg), begun 8 s ago, not ended"
    assert lines[0].endswith("begun 5 s ago, ended")


def test_a_collective_of_nccl_ends_by_its_state_and_one_may_have_no_name_or_tensors() -> None:
    odd = entry("nccl:barrier", 1, seconds=0, retired=False, state="completed", process_group=["3", "undefined"])
    [line] = told([odd | {"input_dtypes": [], "input_sizes": []}], SECOND)
    assert line == "nccl:barrier of nothing, number 1 in group 3, begun 1 s ago, ended"
    assert told([], SECOND) == ["no collective so far"]


@pytest.mark.timeout(120)
def test_a_process_whose_main_thread_is_stuck_tells_them(tmp_path: Path) -> None:
    spec = ProcessSpec("rank 0", tmp_path)
    assert collectives_of(spec, ProcessFacts(os.getpid(), "here"), Nodes()) == ""  # which tells of none: no signal
    process = subprocess.Popen([sys.executable, "-c", STUCK, str(spec.collectives)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "stuck\n"
        for _ in range(2):
            time.sleep(0.01)  # the file's time is to differ
            [line] = collectives_of(spec, ProcessFacts(process.pid, "here"), Nodes()).splitlines()
            assert line.startswith("gloo:all_reduce of Float [3, 2], number 1 in group 0 (default_pg), begun ")
            assert line.endswith(" s ago, ended")
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
