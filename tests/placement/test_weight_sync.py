"""What the search takes a weight sync to cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.placement.cluster import make_cluster
from megarl.placement.weight_sync import BUCKET_BYTES, adapter_bytes, engine_s, sync_seconds
from megarl.placement.workload import recipe_workload
from megarl.recipe.load import load_recipe
from megarl.recipe.roles import Lora
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


def test_files_and_adapters_are_priced_by_the_disk() -> None:
    """GB/s of the disk: written once, read and written down by each node; adapters written and read."""
    cluster = make_cluster("H100", 2)
    cluster = replace(cluster, rates=replace(cluster.rates, disk_bytes_s=2e9, load_tensor_s=0.0, sync_s=1.0))
    whole = workload(QWEN_7B)
    total = whole.served_weights
    load = 2 * total / (cluster.device.memory_bytes_s * cluster.rates.memory)
    by_disk = sync_seconds(QWEN_7B, replace(whole, transport="disk"), cluster)
    assert by_disk == pytest.approx((1 + 3 * total / 2e9 + load,) * 2)
    lora = Lora(rank=8, alpha=16.0, targets=("linear_qkv", "linear_proj"))
    config = QWEN_7B
    q, kv, hidden = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.hidden_size)
    numbers = config.num_layers * 8 * ((hidden + q) + 2 * (hidden + kv) + (q + hidden))
    assert adapter_bytes(config, 8, lora.targets, 2) == 2 * numbers
    alone = sync_seconds(config, replace(whole, transport="adapters", lora=lora), cluster)
    assert alone == pytest.approx((1 + 2 * 2 * numbers / 2e9,) * 2)


def test_fp8_goes_to_servers_on_the_ranks_devices_through_the_host() -> None:
    """Rows of shared memory do not quantise, and NCCL refuses two processes of one device."""
    cluster = make_cluster("H100", 1)
    cluster = replace(cluster, rates=replace(cluster.rates, load_tensor_s=0.0))
    half = replace(workload(QWEN_7B), quantization="fp8")
    rate = cluster.device.host_bytes_s * cluster.rates.host
    load = 2 * half.served_weights / (cluster.device.memory_bytes_s * cluster.rates.memory)
    total = workload(QWEN_7B).served_weights
    last = load / max(1.0, total / BUCKET_BYTES)
    assert sync_seconds(QWEN_7B, half, cluster)[1] == pytest.approx(half.served_weights / rate + last)
    asked = replace(workload(QWEN_7B), transport="broadcast")
    assert sync_seconds(QWEN_7B, asked, cluster)[1] > 1.5 * sync_seconds(QWEN_7B, half, cluster)[1]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "auto"),
        (["sync.transport=disk"], "disk"),
        (["actor.lora={rank: 4, targets: [linear_qkv]}"], "auto"),
        (["actor.lora={rank: 4, targets: [linear_qkv]}", "sync.lora=adapters"], "adapters"),
    ],
)
def test_a_recipes_way_is_what_is_priced(overrides: list[str], expected: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    assert recipe_workload(load_recipe(file, overrides, Recipe).recipe, QWEN_7B).transport == expected
