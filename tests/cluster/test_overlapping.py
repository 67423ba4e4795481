"""An evaluation beside training, whose servers all die when the ranks have other weights already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.process import ProcessFacts, ProcessSpec
from megarl.cluster.rollout import RolloutPool
from megarl.cluster.samples import Samples
from megarl.cluster.waits import Worker
from megarl.core.errors import GivenUpError
from megarl.recipe.run import Model
from megarl.recipe.schema import Data, Eval, Recipe, Rollout, Train
from tests.support.fake_pool import FakeActor, FakeWaiter

RECIPE = Recipe(
    model=Model(path=Path("m")),
    data=Data(train=Path("t"), eval=Path("e")),
    rollout=Rollout(
        prompts_per_step=2, samples_per_prompt=2, max_response_tokens=8, max_staleness=1, in_flight="in_place"
    ),
    eval=Eval(overlap=True),
    train=Train(steps=1),
)


class Stage:
    """A pool of one server. results: by weight version, of the evaluations that have ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.results: dict[int, str] = {}
        self.asked: list[int] = []
        self.traffic = 0
        self.waiter = FakeWaiter()
        self.servers = SimpleNamespace(servers=["server 0"], traffic=self._traffic, pause=lambda **_: None)
        worker = Worker(FakeActor("coordinator"), ProcessSpec("coordinator", tmp_path), ProcessFacts(7, "h"))
        samples = Samples(worker, None, self.waiter, RECIPE, 1)  # type: ignore[arg-type]
        pool: Any = RolloutPool(samples, self.servers, RECIPE, beside=True)  # type: ignore[arg-type]
        monkeypatch.setattr(pool, "_evaluation", self._evaluation)
        monkeypatch.setattr(samples, "wait", lambda *_: None)
        self.pool: RolloutPool = pool

    @contextmanager
    def _traffic(self) -> Iterator[None]:
        self.traffic += 1
        yield

    def _evaluation(self, step: int, version: int) -> Any:
        self.asked.append(version)
        return SimpleNamespace(poll=lambda: self.results.get(version), wait=lambda: self.results[version])


def test_new_weights_wait_for_the_evaluation_of_the_old_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stage = Stage(monkeypatch, tmp_path)
    evaluating = stage.pool.evaluate(4, 5)
    stage.waiter.idle.append(lambda: stage.results.update({5: "right"}))
    stage.pool.pause()
    stage.pool.resume(6)
    assert stage.asked == [5] and evaluating.poll() == "right"  # type: ignore[comparison-overlap]
    assert not stage.waiter.idle, "it was waited for"


def test_without_a_server_that_has_the_weights_it_is_of_the_next_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stage = Stage(monkeypatch, tmp_path)
    evaluating = stage.pool.evaluate(4, 5)
    stage.waiter.idle.append(stage.servers.servers.clear)  # the last server dies
    stage.pool.pause()
    stage.servers.servers.append("server 0")
    stage.pool.resume(6)
    assert stage.asked == [5, 6] and evaluating.poll() is None
    stage.results[5] = "of other weights"
    assert evaluating.poll() is None
    stage.results[6] = "right"
    stage.pool.pause()
    stage.pool.resume(7)
    assert stage.asked == [5, 6]
    assert evaluating.wait() == "right" and stage.traffic == 1  # type: ignore[comparison-overlap]


def test_the_end_of_the_coordinator_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stage = Stage(monkeypatch, tmp_path)
    [ended] = stage.waiter.watches.values()
    with pytest.raises(GivenUpError, match=r"^coordinator \(pid 7 on h\) died, and nobody knows"):
        ended("killed")
