"""How samples and held-out answers are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.rollout import requests
from megarl.rollout.requests import held_out_sampling, train_sampling
from megarl.serving.sampling import LEAVES_NONE_OUT
from tests.rollout.test_collector import make_prompt, make_recipe

TWO_WAYS = {"set_key": "kind", "temperature": 1.0, "sets": {"hard": {"top_p": 0.9}}}
PLAIN, FILTERED = -1, LEAVES_NONE_OUT
# What differs from plain samples and greedy answers; top_k of a sample, and of a held-out answer.
RUNS: dict[str, tuple[dict[str, Any], int, int]] = {
    "greedy answers by themselves": ({}, PLAIN, FILTERED),
    "greedy answers beside samples": ({"eval": {"overlap": True}}, FILTERED, FILTERED),
    "plain answers beside samples": ({"eval": {"overlap": True, "temperature": 1.0}}, PLAIN, PLAIN),
    "answers of two kinds": ({"eval": TWO_WAYS}, PLAIN, FILTERED),
    "a greedy answer for each prompt": (
        {"algorithm": {"advantage": "remax"}, "eval": {"temperature": 1.0}},
        FILTERED,
        PLAIN,
    ),
    "samples that are filtered": ({"rollout": {"top_p": 0.9}, "eval": {"temperature": 1.0}}, FILTERED, PLAIN),
    "samples of so many": ({"rollout": {"top_k": 7}, "eval": {"temperature": 1.0}}, 7, PLAIN),
}


def top_ks(folder: Path, changes: dict[str, Any], **rollout: Any) -> tuple[int, int]:
    """Of a sample and of a held-out answer."""
    changed = {**changes, "rollout": {**changes.get("rollout", {}), **rollout}}
    recipe = make_recipe(folder, data={"eval": folder / "eval.jsonl"}, **changed)
    prompt = make_prompt("p0")
    prompt = prompt.__class__(**{**vars(prompt), "metadata": {"kind": "easy"}})
    asked = (sampling(recipe, prompt).body()["top_k"] for sampling in (train_sampling, held_out_sampling))
    return next(asked), next(asked)


@pytest.mark.parametrize("run", RUNS)
def test_where_a_batch_may_have_requests_of_both_kinds_all_are_drawn_in_one_way(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, sample, answer = RUNS[run]
    own = changes.get("rollout", {}).get("top_k", PLAIN)
    assert top_ks(tmp_path, changes, deterministic=True) == (own, PLAIN), "the CPU's sampler draws each row by itself"
    real = requests.get_platform
    monkeypatch.setattr(requests, "get_platform", lambda name: real("cuda"))
    assert top_ks(tmp_path, changes, deterministic=True) == (sample, answer)
    assert top_ks(tmp_path, changes) == (own, PLAIN)
