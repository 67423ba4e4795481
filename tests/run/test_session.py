"""How ranks are started, and in what order they and servers take a device that both are on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.weight_sync import BLAME_S
from megarl.recipe.load import load_recipe
from megarl.recipe.schema import Recipe
from megarl.recipe.supervised import SftRecipe
from megarl.run import session
from tests.support.dry.world import write_world


@pytest.mark.parametrize(
    ("file", "kind", "deadlines", "waits"),
    [
        ("train", Recipe, ("start_s=60", "train_s=60", "save_s=60"), 600 + BLAME_S),
        ("train", Recipe, ("sync_s=7200",), 7200 + BLAME_S),
        ("train", Recipe, (), 3600),
        ("sft", SftRecipe, ("start_s=60", "train_s=60", "save_s=90"), 90),
    ],
)
def test_ranks_wait_for_each_other_for_as_long_as_one_of_them_may_take(
    file: str, kind: Any, deadlines: tuple[str, ...], waits: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a weight sync all of them wait for the first, which waits for servers."""
    write_world(tmp_path)
    told: list[float] = []
    launching = SimpleNamespace(ready=told.append)
    monkeypatch.setattr(session, "RankGroup", SimpleNamespace(launch=lambda *_: launching))
    monkeypatch.setattr(session, "_threads", lambda *_: (1, None))
    recipe = load_recipe(tmp_path / f"{file}.yaml", [f"deadlines.{each}" for each in deadlines], kind).recipe
    runtime: Any = SimpleNamespace(slots=(None,))
    waiter: Any = None
    session._start_pools(runtime, recipe, waiter)
    assert told == [waits]


@pytest.mark.parametrize(
    ("shared", "order"), [(True, ["servers up", "servers sleep", "roles"]), (False, ["roles", "servers up"])]
)
def test_servers_on_the_ranks_devices_sleep_before_roles_take_memory(shared: bool, order: list[str]) -> None:
    """Awake they have most of a device: the recipes of 4B on eight H100 give them 63 of 80 GiB, and build the actor with 32."""
    done: list[str] = []
    rollout = SimpleNamespace(make_room=lambda: done.append("servers sleep"))

    def ready() -> Any:
        done.append("servers up")
        return rollout

    def build() -> dict[str, Any]:
        done.append("roles")
        return {"actor": None}

    launching: Any = SimpleNamespace(ready=ready)
    assert session.both_ready(launching, build, shared=shared) == (rollout, {"actor": None})
    assert done == order
