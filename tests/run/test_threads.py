"""Threads of ranks and servers: the cores of those that compute at the same time, unless the user has said otherwise."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.runtime import Runtime
from megarl.core.platform import get_platform
from megarl.recipe.load import load_recipe
from megarl.recipe.schema import Recipe
from megarl.run.session import _threads
from tests.support.dry.world import write_world


def runtime(asked: int | None = None, nodes: int = 1, platform: str = "cpu") -> Any:
    found = SimpleNamespace(
        platform=get_platform(platform), asked_threads=asked, nodes=SimpleNamespace(members=[1] * nodes)
    )
    found.threads = lambda together: Runtime.threads(found, together)
    found.rank_threads = lambda together: Runtime.rank_threads(found, together)
    return found


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], (8, 8)),
        (["cluster.devices=2"], (4, 8)),
        (["rollout.servers=2", "rollout.tp=2"], (8, 2)),
        (["cluster.devices=16"], (1, 8)),
        (["rollout.deterministic=true"], (8, 1)),
        (["rollout.max_staleness=1"], (4, 4)),
        (["rollout.max_staleness=1", "rollout.oversample=1.5"], (8, 8)),
    ],
)
def test_all_cores_where_the_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], wanted: tuple[int, int]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("megarl.run.cores.THREAD_FLOPS", 1.0)  # as if its model kept all of them busy
    write_world(tmp_path)
    recipe = load_recipe(tmp_path / "train.yaml", ["cluster.platform=cpu", *words], Recipe).recipe
    assert _threads(runtime(), recipe) == wanted


def test_a_server_of_a_small_model_computes_with_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    write_world(tmp_path)
    recipe = load_recipe(tmp_path / "train.yaml", ["cluster.platform=cpu"], Recipe).recipe
    assert _threads(runtime(), recipe) == (8, 1)


def test_what_the_driver_was_started_with_counts(tmp_path: Path) -> None:
    write_world(tmp_path)
    recipe = load_recipe(tmp_path / "train.yaml", ["cluster.platform=cpu"], Recipe).recipe
    assert _threads(runtime(asked=3), recipe) == (3, 3)


def test_processes_are_counted_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert [runtime(nodes=2).threads(count) for count in (1, 2, 3, 4, 100)] == [8, 8, 4, 4, 1]


def test_on_gpus_ranks_have_a_few_for_what_the_host_does_and_servers_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(96)))
    write_world(tmp_path)
    words = ["cluster.platform=cuda", "model.dtype=bfloat16"]
    found = {}
    for devices in (1, 8, 32, 512):
        recipe = load_recipe(tmp_path / "train.yaml", [*words, f"cluster.devices={devices}"], Recipe).recipe
        found[devices] = _threads(runtime(platform="cuda", nodes=-(-devices // 32)), recipe)
    assert found == {1: (8, None), 8: (8, None), 32: (3, None), 512: (3, None)}
    assert _threads(runtime(asked=5, platform="cuda"), recipe) == (5, 5)
