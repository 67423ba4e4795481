"""What counts as growth."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.soak import FILES, OWN, THREADS, Sample, compared, folder_growth, grown, of_process, quarters

MIB = 2**20


def sample(step: int, own: float = 100 * MIB, threads: float = 5, files: float = 9, other: bool = False) -> Sample:
    row = {"count": 1.0, OWN: own, THREADS: threads, FILES: files}
    kinds = {"rank": row, **({"passing": row} if other else {})}
    return {"step": step, "kinds": kinds, "shared_bytes": 0, "folder": {"logs": 10 * step}}


def test_quarters_leave_the_start_out_and_what_is_not_there_all_the_time() -> None:
    samples = [sample(step, other=step < 50) for step in range(1, 101)]
    first, last = quarters(samples, 100)
    assert (first[0]["step"], first[-1]["step"], last[0]["step"], last[-1]["step"]) == (11, 35, 76, 100)
    assert set(compared(samples, 100)) == {"rank"}
    assert folder_growth(samples, 100) == {"logs": {"first": 350, "last": 1000, "a_step": 10.0}}


@pytest.mark.parametrize(
    ("last", "grows"),
    [
        ({}, []),
        ({"own": 107 * MIB}, []),
        ({"own": 109 * MIB}, ["rank: own_bytes from 104,857,600 to 114,294,784"]),
        ({"threads": 7}, []),
        ({"threads": 8}, ["rank: threads from 5 to 8"]),
        ({"files": 12}, ["rank: descriptors from 9 to 12"]),
        ({"own": 50 * MIB, "files": 3}, []),
    ],
)
def test_what_comes_and_goes_is_no_growth(last: dict[str, float], grows: list[str]) -> None:
    samples = [sample(step, **(last if step > 75 else {})) for step in range(1, 101)]  # type: ignore[arg-type]
    found = {"kinds": compared(samples, 100), "shared_bytes": [0, 8 * MIB]}
    assert grown(found) == grows
    assert grown({**found, "shared_bytes": [0, 9 * MIB]})[-1] == "shared memory from 0 to 9,437,184 bytes"


def test_a_process_is_asked_for_its_own(tmp_path: Path) -> None:
    before = of_process(os.getpid())
    with (tmp_path / "one").open("w"), (tmp_path / "two").open("w"):
        held = bytearray(os.urandom(1) * (32 * MIB))
        after = of_process(os.getpid())
    assert before is not None and after is not None
    assert after[FILES] - before[FILES] == 2
    assert after[OWN] - before[OWN] >= 0.9 * len(held)
    assert of_process(2**22 + 1) is None, "there is no such process"
