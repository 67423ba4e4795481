"""A run whose servers would have to share the ranks' devices is refused where the recipe has them work at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.core.ray_env import RAY_ADDRESS_VARIABLE
from megarl.recipe.schema import Recipe
from tests.support.dry import driver
from tests.support.dry.actors import Book
from tests.support.dry.world import write_world

STALE = "rollout.max_staleness=1"
WORDS = "there are not devices enough for ranks and servers"


@pytest.mark.parametrize("joined", [False, True], ids=["alone", "in a cluster's Ray"])
def test_servers_without_devices_of_their_own_only_carry_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    write_world(tmp_path)
    monkeypatch.setattr(driver, "DEVICES", 1)
    if joined:  # whose devices are known once the run has its own
        monkeypatch.setenv(RAY_ADDRESS_VARIABLE, "host:1")
    told = []

    def run(*overrides: str, name: str) -> Book:
        words = ["cluster.platform=cuda", "model.dtype=bfloat16", f"run.name={name}", *overrides]
        return driver.run(Recipe, tmp_path / "train.yaml", words, tmp_path)

    for overrides in ([STALE], [f"data.eval={tmp_path}/prompts2.jsonl", "eval.overlap=true"]):
        with pytest.raises(UserError, match=WORDS) as refused:
            run(*overrides, name=f"r{len(told)}")
        told.append(str(refused.value))
    assert all("\n" not in each for each in told)
    started = (tmp_path / "runs" / "r0").exists()
    assert started == joined, "before anything starts, where it can be known"

    book = run(STALE, "rollout.oversample=1.5", name="carried")
    assert [what for what in book.told if what[0] == "stopped"] == []


@pytest.mark.parametrize(("devices", "first"), [(1, "rollout"), (2, "actor")], ids=["shared", "apart"])
def test_servers_on_ranks_devices_have_measured_what_is_free_before_a_role_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int, first: str
) -> None:
    """SGLang takes a share of what it finds free as it starts, and ends where that becomes less meanwhile."""
    write_world(tmp_path)
    monkeypatch.setattr(driver, "DEVICES", devices)
    words = ["cluster.platform=cuda", "model.dtype=bfloat16"]
    told = driver.run(Recipe, tmp_path / "train.yaml", words, tmp_path).told
    waits = [what[1:3] for what in told if what[0] == "wait"]
    order = sorted([("start", "rollout"), ("build", "actor")], key=waits.index)
    assert order[0][1] == first
