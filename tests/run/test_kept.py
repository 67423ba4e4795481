"""Who ends the Ray of a run, and when: on a runtime that is a fake, and counts."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.core.errors import WorkerDiedError
from megarl.run.kept import Kept


class FakeRuntime:
    """Counts its ends. judged: what it was told of."""

    def __init__(self) -> None:
        self.ends = 0
        self.judged: list[BaseException] = []

    def judge(self, error: BaseException) -> None:
        self.judged.append(error)

    def close(self) -> None:
        self.ends += 1


POOL: Any = object()


def made(runtimes: list[FakeRuntime]) -> Any:
    runtimes.append(FakeRuntime())
    return runtimes[-1]


def test_a_life_that_ends_in_order_leaves_nothing() -> None:
    runtimes: list[FakeRuntime] = []
    with Kept() as kept, kept.life(lambda: made(runtimes)) as runtime:
        assert runtime is runtimes[0] and kept.take() is None
    assert [each.ends for each in runtimes] == [1] and not runtimes[0].judged


def test_a_pool_goes_on_in_the_same_ray() -> None:
    runtimes: list[FakeRuntime] = []
    died = WorkerDiedError("a rank")
    with Kept() as kept:
        with pytest.raises(WorkerDiedError), kept.life(lambda: made(runtimes)):
            kept.pool = POOL
            raise died
        assert runtimes[0].ends == 0 and runtimes[0].judged == [died]
        with kept.life(lambda: made(runtimes)) as again:
            assert again is runtimes[0] and kept.take() is POOL and kept.take() is None
    assert [each.ends for each in runtimes] == [1]


def test_without_a_pool_ray_is_made_anew() -> None:
    runtimes: list[FakeRuntime] = []
    with Kept() as kept:
        with pytest.raises(WorkerDiedError), kept.life(lambda: made(runtimes)):
            raise WorkerDiedError("Ray itself")
        assert runtimes[0].ends == 1
        with kept.life(lambda: made(runtimes)) as again:
            assert again is runtimes[1]
    assert [each.ends for each in runtimes] == [1, 1]


def test_what_nobody_takes_over_is_ended() -> None:
    runtimes: list[FakeRuntime] = []
    with pytest.raises(WorkerDiedError), Kept() as kept, kept.life(lambda: made(runtimes)):
        kept.pool = POOL
        raise WorkerDiedError("a rank, as often as is allowed")
    assert [each.ends for each in runtimes] == [1]


def test_a_life_that_does_not_start_ends_what_it_took_over() -> None:
    runtimes: list[FakeRuntime] = []
    with Kept() as kept:
        with pytest.raises(WorkerDiedError), kept.life(lambda: made(runtimes)):
            kept.pool = POOL
            raise WorkerDiedError("a rank")
        with pytest.raises(KeyboardInterrupt), kept.life(lambda: made(runtimes)):
            kept.take()
            raise KeyboardInterrupt
    assert [each.ends for each in runtimes] == [1]
