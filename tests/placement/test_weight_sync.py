"""What the search takes a weight sync to cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.placement.cluster import make_cluster
from megarl.placement.weight_sync import engine_s, sync_seconds
from megarl.placement.workload import recipe_workload
from megarl.recipe.load import load_recipe
from megarl.recipe.schema import Recipe
from tests.placement.samples import QWEN_7B, workload

RECIPE = """\
model: {path: nowhere}
data: {train: nowhere.jsonl}
rollout: {prompts_per_step: 4, samples_per_prompt: 4, max_response_tokens: 12}
train: {steps: 2}
"""


def test_a_recipe_in_fp8_is_planned_in_fp8(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    for overrides, expected in (([], None), (["rollout.quantization=fp8"], "fp8")):
        recipe = load_recipe(file, overrides, Recipe).recipe
        assert recipe_workload(recipe, QWEN_7B).quantization == expected


def test_servers_of_their_own_are_sent_what_they_hold() -> None:
    whole, cluster = workload(QWEN_7B), make_cluster("H100", 2)
    half = replace(whole, quantization="fp8")
    in_bfloat16, in_fp8 = (sync_seconds(QWEN_7B, each, cluster)[0] for each in (whole, half))
    # What moves is in proportion to the bytes; the engine's calls are not.
    share = half.served_weights / whole.served_weights
    assert 0.5 < share < 0.6
    calls = cluster.rates.sync_s + engine_s(cluster, QWEN_7B)
    assert in_fp8 - calls == pytest.approx((in_bfloat16 - calls) * share)
