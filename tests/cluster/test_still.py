"""Servers while weights arrive: on actors that are fakes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.rollout import RolloutPool
from megarl.cluster.weight_sync import WeightSync
from megarl.core.errors import SyncError, WorkerDiedError
from megarl.sync.fetch import Fetched
from megarl.sync.sending import Sending, Versions
from megarl.sync.session import SyncReport
from megarl.sync.store import Store
from tests.support.fake_pool import FakeStarter, Stage

DEADLINE_S = 5.0


def pool_of(stage: Stage, in_flight: str, *, beside: bool) -> RolloutPool:
    rollout, deadlines = SimpleNamespace(in_flight=in_flight, keep_kv=True), SimpleNamespace(sync_s=DEADLINE_S)
    recipe: Any = SimpleNamespace(rollout=rollout, deadlines=deadlines, sync=SimpleNamespace(verify="probe"))
    samples: Any = None
    return RolloutPool(samples, stage.pool, recipe, beside)


def told(stage: Stage) -> list[list[tuple[str, Any]]]:
    return [stage.actor(index).told[1:] for index in range(2)]  # without the watch


def test_nothing_begins_at_a_server_while_weights_arrive() -> None:
    """A question whether it works makes a token, and SGLang ends where it is to empty its cache meanwhile."""
    stage = Stage(FakeStarter())
    pool = pool_of(stage, "abort", beside=False)
    for times in (1, 2):
        pool.still()
        pool.arrived()
        pool.arrived()
        assert told(stage) == [[("pause", (False, DEADLINE_S)), ("resume", (DEADLINE_S,))] * times] * 2


def test_those_that_hold_their_requests_in_place_keep_them() -> None:
    stage = Stage(FakeStarter())
    pool = pool_of(stage, "in_place", beside=True)
    pool.pause()
    pool.still()
    pool.arrived()
    assert told(stage) == [[("pause", (True, DEADLINE_S)), ("resume", (DEADLINE_S,))]] * 2


def test_those_that_sleep_begin_nothing_as_it_is_and_are_not_woken() -> None:
    stage = Stage(FakeStarter(offloaded=True))
    stage.pool.asleep = frozenset({"kv_cache"})
    pool = pool_of(stage, "abort", beside=False)
    pool.still()
    pool.arrived()
    assert told(stage) == [[]] * 2


@pytest.mark.parametrize("offload", [("weights", "kv_cache"), ("kv_cache",), ()])
def test_those_that_have_made_room_are_woken_by_the_first_weights(
    monkeypatch: pytest.MonkeyPatch, offload: tuple[str, ...]
) -> None:
    """Before roles are built on their devices. The weights wake first, and the cache for the proof that they have come."""
    stage = Stage(FakeStarter(offloaded=bool(offload)))
    pool = pool_of(stage, "abort", beside=False)
    pool.recipe.rollout.offload = offload  # type: ignore[misc]
    pool.make_room()
    sleep: list[tuple[str, Any]] = [("sleep", (tuple(sorted(offload)), DEADLINE_S))] if offload else []
    assert told(stage) == [sleep] * 2 and stage.pool.asleep == {*offload}
    nobody, sending = Any, SimpleNamespace(transport="broadcast")
    sync = WeightSync("actor", nobody, nobody, pool, pool.recipe, sending)  # type: ignore[arg-type]
    woken: list[frozenset[str]] = []
    monkeypatch.setattr(sync, "_send", lambda _: woken.append(stage.pool.asleep) or 1.0)  # type: ignore[func-returns-value]
    monkeypatch.setattr(sync, "verify", lambda _: {"verified": 1.0})
    sync._deliver(1)
    assert woken == [frozenset(offload) - {"weights"}]


@pytest.mark.parametrize(("transport", "paused"), [("broadcast", 1), ("disk", 1), ("adapters", 0)])
def test_a_sync_sends_while_servers_are_still(monkeypatch: pytest.MonkeyPatch, transport: str, paused: int) -> None:
    stage = Stage(FakeStarter())
    pool, sending = pool_of(stage, "abort", beside=False), SimpleNamespace(transport=transport)
    nobody: Any = None
    sync = WeightSync("actor", nobody, nobody, pool, pool.recipe, sending)  # type: ignore[arg-type]
    actor = stage.actor(0)
    monkeypatch.setattr(sync, "_send", lambda _: len(actor.calls("pause")) - len(actor.calls("resume")))
    monkeypatch.setattr(sync, "verify", lambda _: {"verified": float(len(actor.calls("resume")))})
    metrics = sync._deliver(3)
    assert (metrics["sync/bytes"], metrics["verified"]) == (paused, paused)


@pytest.mark.parametrize("said", ["", "--- in server_1.log: [TP1] Failed to update parameter online: out of memory"])
def test_weights_that_did_not_arrive_are_told_with_what_servers_wrote_of_it(
    monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """SGLang answers for its first rank: what another could not load stands in its log alone."""
    stage = Stage(FakeStarter())
    pool, sending = pool_of(stage, "abort", beside=False), SimpleNamespace(transport="broadcast")
    nobody: Any = None
    sync = WeightSync("actor", nobody, nobody, pool, pool.recipe, sending)  # type: ignore[arg-type]
    monkeypatch.setattr(sync, "_send", lambda _: 1.0)

    def differs(version: int) -> dict[str, float]:
        raise SyncError(f"Weight version {version} did not arrive as it was sent.")

    monkeypatch.setattr(sync, "verify", differs)
    stage.actor(0).answers["failed_loads"] = WorkerDiedError("it died meanwhile")
    stage.actor(1).answers["failed_loads"] = said
    with pytest.raises(SyncError) as raised:
        sync._deliver(3)
    assert str(raised.value) == "\n".join(filter(None, ["Weight version 3 did not arrive as it was sent.", said]))


def test_a_version_that_is_fetched_again_has_the_bytes_that_it_was_written_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stage = Stage(FakeStarter())
    pool = pool_of(stage, "abort", beside=False)
    versions = Versions(Store(tmp_path, "model"), 100, in_place=False)
    sending = Sending("disk", (0,), (0,), (), 1, DEADLINE_S, versions)
    nobody: Any = None
    sync = WeightSync("actor", nobody, nobody, pool, pool.recipe, sending)
    endpoint = stage.pool.servers[0].endpoint
    torn = ["it is cut off", "", "", ""]  # of each fetch
    monkeypatch.setattr(stage.pool, "fetch", lambda _: {endpoint: Fetched(torn.pop(0), torn=True)})
    monkeypatch.setattr(stage.pool, "received", lambda _: None)
    monkeypatch.setattr(sync, "_ask_ranks", lambda version, _: SyncReport(version, (), {}, 100 * version, 0.0, 1))
    assert sync._send(3) == 600  # one was torn, and was written again
    assert sync._send(3) == 600  # nobody was left to serve it, and others fetch it
    assert sync._send(4) == 400
