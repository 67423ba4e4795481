"""Memory that the ranks of a node share: ranks that are threads here, and processes where one of them is killed."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.core.errors import SyncError
from megarl.core.janitor import SHARED_MEMORY
from megarl.core.ports import free_port
from megarl.models import all_gather
from megarl.sync.peer_memory import PeerMemory
from megarl.sync.segments import Segment
from tests.support.forked_ranks import Ranks
from tests.sync.peer_ranks import WAITED_S
from tests.sync.test_memory import TalkingRanks

BYTES = 256
SIZES, WRITERS = {0: BYTES, 2: 64}, {0: frozenset({1, 2}), 2: frozenset({0})}


def together(
    monkeypatch: pytest.MonkeyPatch, made: Callable[[int], Any], act: Callable[[PeerMemory, int], Any]
) -> list[Any]:
    """What each of three ranks has of `act`. made: what a rank makes its memory with, and whether it is kept."""
    monkeypatch.setattr(all_gather, "dist", TalkingRanks(3))

    def one(rank: int) -> Any:
        control: Any = rank
        with PeerMemory(rank=rank, control=control, **made(rank)) as peers:
            peers.take(SIZES, WRITERS)
            found = act(peers, rank)
        peers.close()
        return found

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(one, range(3)))


def of_segments(folder: Path, rank: int, **more: Any) -> dict[str, Any]:
    return {"make": partial(Segment.make, registry=folder / "registry"), "open_": Segment.open, "is_kept": True, **more}


def registered(folder: Path) -> list[str]:
    return (folder / "registry").read_text().split()


def test_ranks_write_into_each_others_memory_which_has_no_name_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = threading.Barrier(3, timeout=10)

    def act(peers: PeerMemory, rank: int) -> tuple[list[int] | None, dict[int, bool]]:
        met.wait()
        # Who is killed from here on leaves nothing behind.
        assert len(registered(tmp_path)) == 2
        assert not any((SHARED_MEMORY / name).exists() for name in registered(tmp_path))
        assert [peers.writers(to) for to in range(3)] == [{1, 2}, frozenset(), {0}]
        first = peers.of(0)
        assert first is not None and len(first) == BYTES
        first[rank] = 10 + rank
        met.wait()
        seen = first[:3].tolist()
        met.wait()
        return seen, {to: peers.of(to) is not None for to in range(3)}

    found = together(monkeypatch, partial(of_segments, tmp_path), act)
    assert [seen for seen, _ in found] == [[10, 11, 12]] * 3
    assert [[to for to, has in having.items() if has] for _, having in found] == [[0, 2], [0], [0, 2]]


def test_memory_is_kept_for_the_next_sync_or_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(peers: PeerMemory, rank: int) -> bool:
        before = peers.of(0)
        peers.rest()
        peers.take(SIZES, WRITERS)
        now = peers.of(0)
        assert before is not None and now is not None
        return now.data_ptr() == before.data_ptr()

    assert all(together(monkeypatch, partial(of_segments, tmp_path), again))
    assert len(registered(tmp_path)) == 2
    together(monkeypatch, partial(of_segments, tmp_path, is_kept=False), again)
    assert len(registered(tmp_path)) == 2 + 4
    assert not any((SHARED_MEMORY / name).exists() for name in registered(tmp_path))


@pytest.mark.parametrize(
    ("which", "writers", "said"),
    [
        ("make", [frozenset(), frozenset(), {0}], "rank 0 cannot share its own memory"),
        ("open_", [{2}, frozenset(), {0}], "rank 1 cannot share the memory of rank 0"),
    ],
)
def test_who_cannot_share_memory_sends_what_it_holds_and_the_log_says_why(
    which: str,
    writers: list[Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refused(*_: Any) -> Any:
        raise SyncError("/dev/shm has no room for it")

    def made(rank: int) -> dict[str, Any]:
        more = {which: refused} if rank == (0 if which == "make" else 1) else {}
        return of_segments(tmp_path, rank, **more)

    found = together(monkeypatch, made, lambda peers, _: [peers.writers(to) for to in range(3)])
    assert found == [writers] * 3
    [record] = caplog.records
    assert said in record.getMessage() and "/dev/shm has no room" in record.getMessage()


def test_a_full_dev_shm_asks_for_nothing_that_is_so_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights go by broadcast or over the disk, and they do go."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    together(monkeypatch, partial(of_segments, tmp_path), lambda *_: None)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all("/dev/shm has no room for 0 MiB" in each and "--shm-size" in each for each in said)
    assert not any("needs" in each or "sync.transport" in each for each in said)


@pytest.mark.parametrize(("which", "tries"), [("open_", 1), ("make", 3)])
def test_what_could_not_be_opened_is_not_taken_again(
    which: str, tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device each handle that nobody opens holds memory; a device that has no room now may have it next time."""
    asked: list[int] = []

    def refused(*_: Any) -> Any:
        asked.append(1)
        raise SyncError("invalid argument")

    def made(rank: int) -> dict[str, Any]:
        more = {which: refused} if rank == (0 if which == "make" else 1) else {}
        return of_segments(tmp_path, rank, is_kept=False, **more)

    def thrice(peers: PeerMemory, rank: int) -> list[Any]:
        for _ in range(2):
            peers.rest()
            peers.take(SIZES, WRITERS)
        return [peers.writers(to) for to in range(3)]

    found = together(monkeypatch, made, thrice)
    assert len(asked) == tries
    assert found == [[frozenset(), frozenset(), frozenset() if which == "open_" else {0}]] * 3


def test_one_rank_alone_asks_nobody() -> None:
    def never(_: Any) -> Any:
        raise AssertionError("nobody writes into it")

    peers = PeerMemory(rank=0, make=never, open_=never, control=None, is_kept=True)
    peers.take({}, {})
    assert peers.of(0) is None and not peers.writers(0)


def test_a_rank_that_is_killed_is_named_within_the_deadline_and_leaves_no_memory(ranks: Ranks, tmp_path: Path) -> None:
    """It has taken its memory, and the other waits for what it writes."""
    said = ranks.run("tests.sync.peer_ranks", 2, free_port(), tmp_path, log=tmp_path / "ranks.log", deadline_s=60)
    assert f"exit codes [0, {-signal.SIGKILL}]" in said, said
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["error"].startswith("Weights were not gathered: rank 0 waited for") and "with rank 1" in told["error"]
    assert told["seconds"] < 4 * WAITED_S
    assert len(registered(tmp_path)) == 2
    assert not any((SHARED_MEMORY / name).exists() for name in registered(tmp_path))
    assert torch.equal(torch.tensor(told["before"]), torch.arange(16.0).view(4, 4))
