"""The queue of tests/suite.py names files that are there, and those that share a server are one of its entries."""

from __future__ import annotations

import re
from pathlib import Path

from tests.suite import num_workers
from tests.support.file_order import LONGEST, ONE_SERVER, place_of

ROOT = Path(__file__).parents[2]


def test_the_files_that_the_queue_names_are_there() -> None:
    assert [name for name in (*LONGEST, *ONE_SERVER) if not (ROOT / name).is_file()] == []
    assert len(set(LONGEST)) == len(LONGEST)


def test_the_files_that_ask_for_the_shared_server_are_one_entry() -> None:
    asks = [path for path in ROOT.glob("tests/**/test_*.py") if re.search(r"\bserved: Pool\b", path.read_text())]
    assert sorted(str(path.relative_to(ROOT)) for path in asks) == sorted(ONE_SERVER)


def test_long_files_come_first_and_one_entry_together() -> None:
    first, second, *_ = LONGEST
    tests = [
        f"{ONE_SERVER[1]}::a",
        "tests/core/test_log.py::b",
        f"{second}::c",
        f"{ONE_SERVER[0]}::d",
        f"{first}::e[x]",
    ]
    assert [test.partition("::")[2] for test in sorted(tests, key=place_of)] == ["e[x]", "c", "a", "d", "b"]


def test_one_worker_more_than_cores_where_the_memory_suffices() -> None:
    gib = 2**30
    assert num_workers(2, 24 * gib) == 3
    assert num_workers(16, 24 * gib) == 4
    assert num_workers(2, 5 * gib) == 1
