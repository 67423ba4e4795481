"""What a recipe's own servers are told."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

import megarl
from megarl.core.platform import get_platform
from megarl.recipe.load import load_recipe
from megarl.run.server_spec import server_spec

RECIPE = Path(megarl.__file__).parent.parent / "recipes" / "qwen3_4b_gsm8k_8.yaml"
ALONE = ("rollout.offload=[]", "rollout.server_args=[]", "rollout.max_staleness=1")
HELD = ("rollout.in_flight=in_place", "rollout.keep_kv=true")


def told(flag: str, *overrides: str, platform: Literal["cpu", "cuda"] = "cuda") -> str | None:
    """What follows a flag; None where it is not there."""
    words = server_spec(load_recipe(RECIPE, overrides).recipe).words(get_platform(platform), "127.0.0.1", 1)
    return words[words.index(flag) + 1] if flag in words else None


def test_steps_of_all_that_may_run_are_captured() -> None:
    assert told("--cuda-graph-max-bs-decode") == "256"
    assert told("--cuda-graph-max-bs-decode", "rollout.max_running_requests=700") == "700"
    assert told("--cuda-graph-max-bs-decode", platform="cpu") is None


@pytest.mark.parametrize(("overrides", "longest"), [((), None), (HELD[:1], None), (HELD, "900")])
def test_a_server_that_holds_requests_outlives_the_longest_sync(
    overrides: tuple[str, ...], longest: str | None
) -> None:
    assert told("--watchdog-timeout", *ALONE, *overrides) == longest


@pytest.mark.parametrize("freeze", [True, False])
def test_a_server_hears_whether_the_tower_learns(freeze: bool) -> None:
    recipe = load_recipe(RECIPE, (f"actor.optimizer.freeze_vision_tower={str(freeze).lower()}",)).recipe
    assert server_spec(recipe).tower_learns is not freeze


@pytest.mark.parametrize(
    ("guessing", "offload", "kept"),
    [
        ("NEXTN", "[weights, kv_cache]", True),
        ("NEXTN", "[kv_cache]", False),
        ("NGRAM", "[weights, kv_cache]", False),
    ],
)
def test_a_draft_outlives_its_servers_sleep(guessing: str, offload: str, kept: bool) -> None:
    """Nobody sends it again."""
    flags = f"rollout.server_args=[--speculative-algorithm, {guessing}]"
    spec = server_spec(load_recipe(RECIPE, (f"rollout.offload={offload}", flags)).recipe)
    assert ("--enable-draft-weights-cpu-backup" in spec.words(get_platform("cuda"), "127.0.0.1", 1)) == kept
