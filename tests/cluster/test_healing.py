"""A pool whose servers die, in every state: on actors and calls that are fakes, and end when the test says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster import healing
from megarl.cluster.healing import Restarts, State
from megarl.cluster.process import ProcessFacts
from megarl.cluster.server_actors import Started
from megarl.cluster.waits import Call
from megarl.core.errors import WorkerDiedError
from megarl.sync.fetch import Fetched, Order
from megarl.sync.store import Store
from tests.support.fake_pool import VERSION, FakeStarter, Stage

CACHE, WEIGHTS = ("kv_cache",), ("weights",)


def test_a_server_that_dies_is_started_again_and_serves_after_the_next_push(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(FakeStarter())
    pool, old = stage.pool, stage.actor(1)
    url = pool.servers[1].endpoint.url
    stage.waiter.die(old)
    assert stage.states() == [State.SERVING, State.SUSPECT]
    assert stage.router().calls("remove") == [(url,)] and old.calls("stop") == [()]
    assert [server.worker.handle for server in pool.receivers()] == [stage.actor(0)]
    # Its devices are free only once nothing of it is left, the actor included.
    assert stage.waiter.finish("stop") == 1
    assert stage.starter.ended == [old] and stage.states()[1] is State.STARTING
    stage.waiter.finish("start")
    assert stage.states()[1] is State.READY
    # The weights of its files are not the run's: no request before a push and a proof.
    assert len(pool.servers) == 1 and len(pool.receivers()) == 2
    assert [endpoint for (endpoint,) in stage.router().calls("add")] == []
    pool.received([server.endpoint for server in pool.receivers()])
    assert stage.states()[1] is State.CURRENT and len(pool.holding()) == 2 and len(pool.servers) == 1
    pool.admit(VERSION)
    assert stage.states() == [State.SERVING, State.SERVING]
    (added,) = [endpoint for (endpoint,) in stage.router().calls("add")]
    assert added.url == pool.servers[1].endpoint.url != url
    assert stage.restarts.total == 1
    assert "sglang server 1 is back after 0 s, weights of version 3 verified" in caplog.text


def test_one_that_is_ready_only_after_the_weights_were_sent_waits_for_the_next_push() -> None:
    stage = Stage(FakeStarter())
    stage.waiter.die(stage.actor(1))
    stage.waiter.finish("stop")
    sent_to = [server.endpoint for server in stage.pool.receivers()]
    stage.waiter.finish("start")
    stage.pool.received(sent_to)
    stage.pool.admit(VERSION)
    assert stage.states() == [State.SERVING, State.READY]


def test_one_that_does_not_start_is_another_death() -> None:
    stage = Stage(FakeStarter())
    stage.waiter.die(stage.actor(1))
    stage.waiter.finish("stop", failure="its supervisor ended")  # the actor died: nothing to end, and it is done again
    stage.waiter.finish("start", failure="out of memory")
    assert stage.states()[1] is State.SUSPECT and stage.restarts.total == 2
    stage.waiter.finish("stop")
    stage.waiter.finish("start")
    assert stage.states()[1] is State.READY
    assert stage.restarts.deaths == {"sglang server 1": 2}


def test_a_server_over_several_nodes_restarts_whole() -> None:
    stage = Stage(FakeStarter(parts=2))
    old = [part.handle for part in stage.pool.members[0].parts]
    stage.waiter.die(old[1])
    assert [actor.calls("stop") for actor in old] == [[()], [()]]
    stage.waiter.die(old[0])  # it follows from the first
    assert stage.restarts.total == 1
    stage.waiter.finish("stop")
    assert stage.starter.ended == old
    stage.waiter.finish("start")
    assert len(stage.pool.members[0].parts) == 2 and not set(old) & {
        part.handle for part in stage.pool.members[0].parts
    }


def test_a_server_with_a_node_that_does_not_see_a_version_does_not_load_it() -> None:
    stage = Stage(FakeStarter(parts=2))
    for member in stage.pool.members:
        member.parts[0].handle.answers["fetch"] = Fetched()
    stage.pool.members[1].parts[1].handle.answers["sees"] = "it is not there"
    order = Order(Store(Path("/shared"), "model"), 4, flush_cache=True, in_place=True, timeout_s=5.0)
    ends = [server.endpoint for server in stage.pool.servers]
    assert stage.pool.fetch(order) == {ends[0]: Fetched(), ends[1]: Fetched("it is not there")}
    assert [len(stage.actor(index).calls("fetch")) for index in range(2)] == [1, 0]


def test_where_nobody_is_left_the_first_that_is_ready_gets_the_weights_again() -> None:
    stage = Stage(FakeStarter())
    with stage.pool.traffic():
        for index in (0, 1):
            stage.waiter.die(stage.actor(index))
        stage.waiter.finish("stop")
        assert stage.pool.servers == [] and stage.pushes == 0
        stage.waiter.finish("start")
        assert stage.pushes == 1
    assert stage.states() == [State.SERVING, State.READY]


def test_one_that_was_ready_already_takes_over_from_the_last() -> None:
    stage = Stage(FakeStarter())
    with stage.pool.traffic():
        stage.waiter.die(stage.actor(1))
        stage.waiter.finish("stop")
        stage.waiter.finish("start")
        assert stage.pushes == 0
        stage.waiter.die(stage.actor(0))
        assert stage.pushes == 1 and stage.states() == [State.SUSPECT, State.SERVING]


def test_nothing_is_sent_while_nobody_asks_for_samples() -> None:
    """The ranks may be in the middle of an update."""
    stage = Stage(FakeStarter())
    for index in (0, 1):
        stage.waiter.die(stage.actor(index))
    stage.waiter.finish("stop")
    stage.waiter.finish("start")
    assert stage.pushes == 0 and stage.states() == [State.READY, State.READY]
    with stage.pool.traffic():
        assert stage.pushes == 1 and len(stage.pool.servers) == 2


def test_without_restarts_the_last_death_ends_the_run() -> None:
    stage = Stage(FakeStarter(), most=0)
    stage.waiter.die(stage.actor(0))
    stage.waiter.finish("stop")
    assert stage.states() == [State.GONE, State.SERVING] and stage.restarts.total == 0
    with pytest.raises(WorkerDiedError, match=r"(?s)server 1 \(http://h:9001, pid 51\).*no server remains.*its log"):
        stage.waiter.die(stage.actor(1))


def test_too_many_deaths_end_the_run_with_who_died_how_often() -> None:
    stage = Stage(FakeStarter(), most=2)
    for _ in range(2):
        stage.waiter.die(stage.actor(1))
        stage.waiter.finish("stop")
        stage.waiter.finish("start")
    with pytest.raises(WorkerDiedError) as caught:
        stage.waiter.die(stage.actor(0), "killed\nend of its log")
    assert "rollout.max_restarts allows 2 within 60 minutes" in str(caught.value) and "end of its log" in str(
        caught.value
    )
    assert "Deaths so far: sglang server 1 2, sglang server 0 1." in str(caught.value)


def test_deaths_of_long_ago_do_not_count() -> None:
    times = iter([0.0, 10.0, healing.WINDOW_S + 5.0, healing.WINDOW_S + 6.0])
    restarts = Restarts(2, clock=lambda: next(times))
    assert [restarts.count("one", "") for _ in range(3)] == [True, True, True]
    with pytest.raises(WorkerDiedError, match="allows 2 within 60 minutes"):
        restarts.count("one", "")
    assert restarts.total == 3


def test_a_server_on_a_node_that_is_lost_is_gone_for_good() -> None:
    stage = Stage(FakeStarter())
    stage.starter.lost_slots.add(1)
    stage.waiter.die(stage.actor(1))
    stage.waiter.finish("stop")
    assert stage.states() == [State.SERVING, State.GONE] and stage.restarts.total == 0


def test_a_server_of_an_offloaded_pool_starts_only_while_samples_are_made_and_sleeps_with_the_others() -> None:
    """Its memory is the ranks' at all other times."""
    stage = Stage(FakeStarter(offloaded=True))
    pool = stage.pool
    pool.sleep([*CACHE, *WEIGHTS], 1.0)
    stage.waiter.die(stage.actor(1))
    stage.waiter.finish("stop")
    assert stage.states()[1] is State.GONE
    pool.wake([*CACHE, *WEIGHTS], 1.0)
    assert stage.states()[1] is State.GONE
    with pool.traffic():
        assert stage.states()[1] is State.STARTING
    stage.waiter.idle = [lambda: stage.waiter.finish("start")]
    pool.sleep([*CACHE, *WEIGHTS], 1.0)
    assert stage.states()[1] is State.READY and stage.waiter.idle == []
    assert stage.actor(1).calls("sleep") == [(("kv_cache", "weights"), 1.0)]
    pool.wake(WEIGHTS, 1.0)
    assert stage.actor(1).calls("wake") == [(("weights",), False, 1.0)]
    pool.wake(CACHE, 1.0)
    assert stage.actor(1).calls("wake")[-1] == (("kv_cache",), True, 1.0)


def test_where_all_died_asleep_they_start_awake_for_the_push() -> None:
    stage = Stage(FakeStarter(offloaded=True))
    stage.pool.sleep([*CACHE, *WEIGHTS], 1.0)
    for index in (0, 1):
        stage.waiter.die(stage.actor(index))
    stage.waiter.finish("stop")
    assert stage.states() == [State.GONE, State.GONE]
    stage.waiter.idle = [lambda: stage.waiter.finish("start")]
    stage.pool.await_ready()
    assert stage.states() == [State.READY, State.READY] and stage.pool.asleep == frozenset()


def test_a_server_that_cannot_sleep_is_started_again() -> None:
    stage = Stage(FakeStarter())
    stage.actor(0).answers["sleep"] = "it answered 500"
    stage.pool.sleep(CACHE, 1.0)
    assert stage.states() == [State.SUSPECT, State.SERVING]


def test_the_router_is_back_at_its_port_and_knows_who_serves() -> None:
    stage = Stage(FakeStarter())
    stage.waiter.die(stage.actor(1))
    old = stage.router()
    stage.waiter.die(old)
    stage.waiter.finish("stop")
    assert stage.starter.ports == [None, 9002] and old in stage.starter.ended
    # What joins meanwhile is told to the router that comes.
    stage.waiter.finish("start")
    assert stage.router() is not old
    assert [endpoint.name for (endpoint,) in stage.router().calls("add")] == ["sglang server 0"]
    assert stage.restarts.deaths == {"sglang server 1": 1, "the router": 1}
    assert stage.pool.endpoint.url == "http://h:9002"


def test_a_router_that_comes_while_the_servers_sleep_is_told_of_them_once_they_are_awake() -> None:
    stage = Stage(FakeStarter())
    stage.pool.sleep(CACHE, 1.0)
    stage.waiter.die(stage.router())
    stage.waiter.finish("stop")
    stage.waiter.finish("start")
    assert stage.router().calls("add") == []
    stage.pool.wake(CACHE, 1.0)
    assert len(stage.router().calls("add")) == 2


def test_a_router_that_dies_while_it_takes_a_server_in_is_no_fault_of_the_server() -> None:
    stage = Stage(FakeStarter())
    stage.waiter.die(stage.actor(1))
    stage.waiter.finish("stop")
    stage.waiter.finish("start")
    router = stage.router()
    wait = stage.waiter.wait

    def dying(calls: Sequence[Call], **named: Any) -> list[Any]:
        if calls[0].result.actor is router:
            stage.waiter.die(router)
            raise WorkerDiedError("the router's actor")
        return list(wait(calls, **named))

    stage.waiter.wait = dying
    stage.push()
    assert stage.states() == [State.SERVING, State.SERVING]
    stage.waiter.finish("stop")
    stage.waiter.finish("start")
    assert len(stage.router().calls("add")) == 2


def test_a_router_without_restarts_ends_the_run() -> None:
    stage = Stage(FakeStarter(), most=0)
    with pytest.raises(WorkerDiedError, match=r"(?s)The router \(http://h:9002\) ended\. killed"):
        stage.waiter.die(stage.router())


def test_where_weights_never_change_a_server_that_is_up_may_serve() -> None:
    """An evaluation of a model's files."""
    stage = Stage(FakeStarter())
    stage.pool.refresh = None
    stage.waiter.die(stage.actor(1))
    stage.waiter.finish("stop")
    stage.waiter.finish("start")
    assert stage.states()[1] is State.READY
    stage.waiter.finish("add")
    assert stage.states()[1] is State.SERVING


def test_closing_starts_nothing_and_ends_what_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.cluster import servers

    stage = Stage(FakeStarter())
    stage.waiter.die(stage.actor(1))
    stage.waiter.finish("stop")
    waited: list[Any] = []
    monkeypatch.setattr(servers.ray, "wait", lambda refs, **_: waited.extend(refs))
    stage.pool.close()
    assert not stage.waiter.watches and not stage.waiter.followed
    assert {ref.actor for ref in waited} == {stage.actor(0), stage.actor(1), stage.router()}
    assert stage.states()[1] is State.STARTING and stage.actor(1).calls("stop") == [()]


def test_a_server_that_comes_back_at_its_address_is_another_to_whoever_watched_the_one_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage(FakeStarter(external=True))
    old = stage.actor(1)
    old_watch = next(ref for ref in stage.waiter.watches if ref.actor is old)
    stage.pool.drop(stage.pool.servers[1].endpoint, "it failed the weight sync")
    assert "and is looked for again (restart 1)" in caplog.text
    stage.waiter.finish("stop")
    stage.waiter.finish("start")
    stage.push()
    assert stage.states() == [State.SERVING, State.SERVING]
    # The actor beside the one before is ended only now, and says so.
    stage.waiter.watches.pop(old_watch)("its supervisor ended")
    assert stage.states() == [State.SERVING, State.SERVING] and stage.restarts.total == 1


def test_what_became_of_a_server_in_a_sync_is_not_said_of_the_one_that_came_back_at_its_address() -> None:
    stage = Stage(FakeStarter(external=True))
    before = stage.pool.servers[1].endpoint
    stage.waiter.die(stage.actor(1))
    stage.waiter.finish("stop")
    stage.actor(1).answers["start"] = Started(0, ProcessFacts(1, "h"), replace(before, since=7.0))
    stage.waiter.finish("start")
    stage.pool.received([before])
    assert stage.states()[1] is State.READY
    stage.pool.drop(before, "It failed the weight sync")
    assert stage.states()[1] is State.READY
    stage.pool.received([replace(before, since=7.0)])
    assert stage.states()[1] is State.CURRENT


def test_external_servers_that_were_looked_for_in_vain_are_gone_for_good_and_the_last_ends_the_run() -> None:
    stage = Stage(FakeStarter(external=True))
    stage.waiter.die(stage.actor(1))
    stage.waiter.finish("stop")
    stage.waiter.finish("start", failure="It was looked for in vain for 60 s")
    stage.waiter.finish("stop")
    assert stage.states() == [State.SERVING, State.GONE] and stage.restarts.total == 1
    stage.waiter.die(stage.actor(0))
    stage.waiter.finish("stop")
    assert stage.states()[0] is State.STARTING
    with pytest.raises(WorkerDiedError, match=r"server 0 left the pool, and no server remains\. .*in vain for 60 s"):
        stage.waiter.finish("start", failure="It was looked for in vain for 60 s")
