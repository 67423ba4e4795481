"""Which servers a run keeps where it goes back to its last checkpoint, and how the next life takes them over: on fakes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster import kept
from megarl.cluster.healing import Restarts, State
from megarl.cluster.kept import KeptPool, keep
from megarl.cluster.process import ProcessFacts, ProcessSpec
from megarl.cluster.server_launch import LaunchingPool
from megarl.cluster.waits import Worker
from megarl.core.errors import DeadlineError
from tests.support.fake_pool import FakeActor, FakeStarter, FakeWaiter, Stage


class FakeNodes:
    """Notes whom it ended. ray_ended: what has, of Ray's own."""

    def __init__(self, ray_ended: str = "", lost: dict[str, str] | None = None, error: Exception | None = None) -> None:
        self.services = SimpleNamespace(ended=lambda: ray_ended)
        self.lost = lambda: lost or {}
        self.error = error
        self.ended: list[dict[str, list[int]]] = []

    def end(self, pids: dict[str, list[int]]) -> None:
        self.ended.append(pids)
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[FakeActor]:
    """Actors that were killed."""
    found: list[FakeActor] = []

    def wait(refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert num_returns == len(refs) > 0, "Ray waits for one at least"
        return refs, []

    ray = SimpleNamespace(kill=found.append, wait=wait)
    monkeypatch.setattr(kept, "ray", ray)
    return found


def worker(pid: int, address: str) -> Worker:
    return Worker(FakeActor(f"rank {pid}"), ProcessSpec("rank", "logs"), ProcessFacts(pid, "host", address))  # type: ignore[arg-type]


def kept_of(stage: Stage, nodes: Any, *others: Worker) -> KeptPool | None:
    return keep(stage.pool, (), others, nodes)


def test_all_others_are_ended_and_servers_let_go(killed: list[FakeActor]) -> None:
    stage, nodes = Stage(FakeStarter()), FakeNodes()
    others = [worker(7, "a"), worker(8, "b"), worker(9, "a"), worker(0, "?")]
    left = kept_of(stage, nodes, *others)
    assert left is not None and list(left.members) == [0, 1] and left.router is stage.pool.router
    assert killed == [other.handle for other in others]
    assert nodes.ended == [{"a": [7, 9], "b": [8]}]  # one that had not said yet which it is is Ray's to end
    assert not stage.waiter.watches and not stage.waiter.followed
    for index in range(2):
        assert stage.actor(index).calls("release") == [(kept.RELEASE_S,)]
    assert len(stage.router().calls("remove")) == 2
    assert stage.states() == [State.READY, State.READY]


def test_one_that_is_down_or_does_not_let_go_is_started_anew(
    killed: list[FakeActor], caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(FakeStarter())
    stage.waiter.die(stage.actor(0))
    left = kept_of(stage, FakeNodes())
    assert left is not None and list(left.members) == [1] and killed == [stage.actor(0)]

    stage = Stage(FakeStarter(offloaded=True))
    stage.waiter.die(stage.actor(0))
    assert stage.waiter.finish("stop") and stage.states()[0] is State.GONE
    left = kept_of(stage, FakeNodes())
    assert left is not None and list(left.members) == [1] and killed[1:] == []

    stage = Stage(FakeStarter())
    stage.actor(1).answers["release"] = "it does not answer\nmore"
    left = kept_of(stage, FakeNodes())
    assert left is not None and list(left.members) == [0] and killed[1:] == [stage.actor(1)]
    assert stage.actor(1).calls("stop") == [()]
    assert "sglang server 1 is not kept: it does not answer" in caplog.text


def test_without_ray_its_nodes_or_the_router_nothing_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    assert kept_of(Stage(FakeStarter()), FakeNodes(ray_ended="the raylet")) is None
    assert kept_of(Stage(FakeStarter()), FakeNodes(lost={"node": "no heartbeat"})) is None
    stage = Stage(FakeStarter())
    stage.waiter.die(stage.router())
    assert kept_of(stage, FakeNodes()) is None
    assert kept_of(Stage(FakeStarter()), FakeNodes(error=DeadlineError("a node is silent\nmore"))) is None
    assert "the servers are started anew, too: a node is silent" in caplog.text


def test_the_next_life_starts_what_is_missing_alone() -> None:
    starter = FakeStarter()
    stage = Stage(starter)
    stage.waiter.die(stage.actor(0))
    left, first = kept_of(stage, FakeNodes()), stage.actor(1)
    made = len(starter.made)
    fake, waiter = Any, FakeWaiter()
    fake = starter
    launching = LaunchingPool.launch(fake, waiter, Restarts(1), left)  # type: ignore[arg-type]
    assert [actor.name for actor in starter.made[made:]] == ["server 0"]
    assert first.calls("start") == [] and stage.router().calls("start") == []
    pool = launching.ready()
    assert pool.router is stage.pool.router and pool.endpoint == stage.pool.endpoint
    assert [server.worker.handle for server in pool.servers] == [starter.made[-1], first]
    assert len(stage.router().calls("add")) == 2
    assert {ref.actor for ref in waiter.watches} == {starter.made[-1], first, stage.router()}
