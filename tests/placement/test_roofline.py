"""Products, bytes and collectives by hand, and what follows for devices of another balance than H100's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.models.flops import forward_flops, train_flops
from megarl.placement.calibrate import with_rates
from megarl.placement.cluster import make_cluster
from megarl.placement.compute import score_seconds, update_seconds
from megarl.placement.devices import DEVICES, WITHOUT_NVLINK
from megarl.placement.generation import prompt_flops, rollout_seconds, step_model
from megarl.placement.layers import _attention_seconds
from megarl.placement.lengths import lognormal
from megarl.placement.links import all_reduce_s, server_reduce_s
from megarl.placement.memory import server_bytes
from megarl.placement.rates import RATES
from megarl.placement.roofline import (
    Roof,
    attention_products,
    chunked_multiplications,
    mlp_products,
    prefilled_multiplications,
    training_roof,
)
from megarl.placement.sizes import model_sizes
from tests.placement.samples import LATENT, QWEN_7B, QWEN_30B_A3B, workload
from tests.placement.test_models_of_cost import choice, servers
from tests.support.large import large_model

GPUS = [name for name, device in DEVICES.items() if device.queues]


def test_a_product_takes_its_operations_or_its_bytes() -> None:
    roof = Roof(flops_s=100.0, bytes_s=10.0)
    # 2 x 3 x 5 x 7 operations; 35 weights and 36 activations of 2 bytes each.
    assert roof.product_s(3, 5, 7, 2, 2) == pytest.approx(max(210 / 100, (35 * 2 + 3 * 12 * 2) / 10))
    wide = replace(roof, bytes_s=1e9)
    assert wide.product_s(3, 5, 7, 2, 2) == pytest.approx(2.1)


@pytest.mark.parametrize("config", [QWEN_7B, LATENT], ids=["grouped", "latent"])
def test_the_products_of_a_layer_are_its_parameters(config) -> None:  # type: ignore[no-untyped-def]
    products = attention_products(config, 1) + mlp_products(config.hidden_size, config.ffn_hidden_size, 1)
    sizes = model_sizes(config)
    assert sum(inner * columns for inner, columns in products) == sizes.attention + sizes.dense_mlp


def test_a_server_reads_prompts_by_linear_attention_in_chunks() -> None:
    config = large_model("qwen3_5")
    assert config.delta is not None and len(config.linear_layers) == 24
    # 32 value heads: 10 of 16 blocks of keys by keys, what is forgotten, and queries by keys; what is written, and what is read
    # of 64 tokens; three times the state of 128 x 128. Four tokens of 8,192 channels.
    by_hand = 32 * ((10 / 16 + 1 + 1) * 64 * 128 + (1 + 1) * 64 * 128 + 3 * 128 * 128) + 4 * 8192
    assert prefilled_multiplications(config.delta) == by_hand == 2_818_048
    token_by_token = 32 * 3 * 128 * 128 + 4 * 8192
    flops = forward_flops(config, [640])
    more = prompt_flops(config, 640) - (flops.total - flops.logits)
    assert more == pytest.approx(2 * 640 * 24 * (2_818_048 - token_by_token))
    plain = forward_flops(QWEN_7B, [640])
    assert prompt_flops(QWEN_7B, 640) == plain.total - plain.logits


def test_linear_attention_multiplies_in_chunks_and_in_float32() -> None:
    config, h100 = large_model("qwen3_5"), make_cluster("H100", 1)
    assert config.delta is not None
    # 16 key heads: keys by keys and by queries. 32 value heads: a system of 64 rows, half of it zeros, with 256 columns; what
    # queries read of 64 tokens; three times the state of 128 x 128. Four tokens of 8,192 channels.
    by_hand = 16 * 2 * 64 * 128 + 32 * (64 * 256 / 2 + 64 * 128 + 3 * 128 * 128) + 4 * 8192
    assert chunked_multiplications(config.delta) == by_hand == 2_392_064
    work = workload(config, prompt_tokens=0.0, responses=lognormal(1e-3, 0.1, 1))  # no token sees another
    layout, tokens = choice(1, tp=1), 8192.0
    forward, backward = _attention_seconds(config, layout, tokens, work, h100)
    rate = h100.rates.attention
    full = tokens * 4 * 16 * 256 / 4 / (h100.device.product_flops("bfloat16") * rate)
    linear = tokens * 2 * by_hand * 3 / 4 / (h100.device.fp32_flops * rate)
    assert forward[0] == pytest.approx(full + linear) and backward[0] == pytest.approx(3.5 * full + 2 * linear)


def test_key_value_heads_are_repeated_where_they_are_few() -> None:
    # 28 heads and 4 key-value heads of 128 on 8 ranks: 3.5 heads and one pair each.
    assert attention_products(QWEN_7B, 8)[0] == (3584, (3.5 + 2) * 128)


def _share(device: str) -> float:
    """Of the device's peak, in an update of the 7B with tp 2, with long enough micro-batches."""
    work = workload(QWEN_7B, mini_batches=1, responses=lognormal(1200, 0.9, 8192), longest_sample=10240)
    seconds = update_seconds(QWEN_7B, choice(8, tp=2, micro=20480), work, make_cluster(device, 1))
    lengths = np.round(work.responses.grid + work.prompt_tokens).astype(np.int64)
    flops = train_flops(QWEN_7B, lengths) / len(lengths) * work.samples
    return flops / (seconds.total[0] - seconds.optimizer[0]) / 8 / DEVICES[device].flops


def test_a_device_of_little_arithmetic_and_much_memory_reaches_more_of_its_peak() -> None:
    """verl's runs of this model reach 0.36 to 0.44 of an H100 and 0.78 to 0.83 of an H20, by their formula."""
    assert 0.33 < _share("H100") < 0.48
    assert 0.68 < _share("H20") < 0.85
    assert _share("H20") > 1.5 * _share("H100")


def test_one_set_of_rates_for_all_gpus() -> None:
    links = {"hop_s", "reduce_s"}
    for name in GPUS:
        own, h100 = vars(RATES[name]), vars(RATES["H100"])
        assert {rate for rate in own if own[rate] != h100[rate]} <= (links if name in WITHOUT_NVLINK else set()), name


def test_devices_reach_no_more_than_their_data_sheets_say() -> None:
    assert {"A100-80", "A800", "H100", "H800", "H200", "H20", "H20-141", "B200", "GB200", "B300"} <= set(GPUS)
    assert {"MI300X", "MI325X", "L40S"} <= set(GPUS)
    for device in DEVICES.values():
        assert 0.4 * device.flops < device.matmul_flops <= device.flops
        assert device.source and device.per_node >= 1 and device.memory_bytes > 0


@given(tp=st.sampled_from([1, 2, 4, 8]), micro=st.sampled_from([2048, 8192, 32768]))
def test_what_is_faster_in_every_way_is_never_slower(tp: int, micro: int) -> None:
    work = workload(QWEN_7B)
    slow, fast = (make_cluster(name, 2) for name in ("H100", "B200"))
    for kind in (score_seconds, update_seconds):
        one, other = (kind(QWEN_7B, choice(16, tp, micro=micro), work, each).total[0] for each in (slow, fast))
        assert other <= one * 1.0001


@given(tokens=st.integers(1, 100_000), tp=st.sampled_from([1, 2, 4, 8]))
def test_a_share_of_the_peak_is_never_above_what_products_reach(tokens: int, tp: int) -> None:
    roof = training_roof(make_cluster("H20", 1), "bfloat16")
    for inner, columns in mlp_products(3584, 18944, tp):
        assert 2 * tokens * inner * columns / roof.product_s(tokens, inner, columns, 2, 2) <= roof.flops_s * 1.0001


def test_gradients_of_experts_are_reduced_among_their_own_copies() -> None:
    """30B-A3B on 32 devices: with 8 ranks an expert's copies are on other nodes, with 32 there is one of each."""
    work = workload(QWEN_30B_A3B, mini_batches=1)
    cluster = make_cluster("H100", 4)
    apart, single = (update_seconds(QWEN_30B_A3B, choice(32, ep=ep), work, cluster).gradients[0] for ep in (8, 32))
    routed = 48 * model_sizes(QWEN_30B_A3B).routed / 8 * 6
    network = cluster.device.between_bytes_s * cluster.rates.network
    assert apart - single == pytest.approx(routed * 3 / 4 / network, rel=0.01)


# Microseconds of SGLang's custom all-reduce on H100 by bytes and ranks, outside of graphs (SGLang, pull request 2904).
MEASURED = {
    4096: {2: 3.9, 4: 3.7, 8: 5.7},
    32768: {2: 4.5, 4: 4.8, 8: 7.8},
    262144: {2: 7.9, 4: 13.9, 8: 16.7},
    524288: {2: 12.5, 4: 20.2, 8: 22.1},
    1048576: {2: 19.9, 4: 31.1, 8: 33.8},
}


def test_small_all_reduces_take_what_was_measured() -> None:
    cluster = make_cluster("H100", 1)
    off = [
        float(server_reduce_s(cluster, size, ranks)) * 1e6 / microseconds
        for size, by_ranks in MEASURED.items()
        for ranks, microseconds in by_ranks.items()
    ]
    assert max(off) < 1.5 and min(off) > 0.65
    assert 0.85 < float(np.median(off)) < 1.15


def test_large_messages_and_those_between_nodes_are_left_to_nccl() -> None:
    cluster = make_cluster("H100", 2)
    assert server_reduce_s(cluster, 64e6, 8) == all_reduce_s(cluster, 64e6, 8, 1)
    assert server_reduce_s(cluster, 1e4, 16) == all_reduce_s(cluster, 1e4, 16, 1)
    assert server_reduce_s(cluster, 1e6, 1) == 0


def _generation(tp: int, **more: object) -> float:
    work = workload(QWEN_7B, prompts=8192, responses=lognormal(1200, 0.9, 8192), prompt_tokens=150.0, **more)
    one = servers(8, tp, 0.8)
    held = server_bytes(QWEN_7B, one, make_cluster("H100", 1), 2)
    return float(rollout_seconds(QWEN_7B, one, held, work, make_cluster("H100", 1)).total[0])


def test_cutting_servers_costs_what_was_measured() -> None:
    """8,192 answers of a 7B on 8 H100: 144 s with eight servers, 328 to 399 s with two of tp 4 (verl's runs, in rows.csv)."""
    assert 130 < _generation(1) < 175
    assert 280 < _generation(4) < 400


def test_servers_in_fp8_read_half_the_weights_and_multiply_faster() -> None:
    whole, half = (workload(QWEN_7B, quantization=each) for each in (None, "fp8"))
    cluster = make_cluster("H100", 1)
    one, other = (step_model(work, cluster, 1, 1)(np.array([1.0]), 100.0)[0] for work in (whole, half))
    layers = model_sizes(QWEN_7B).total - 2 * 152064 * 3584
    assert one - other == pytest.approx(layers / (cluster.device.memory_bytes_s * cluster.rates.memory), rel=0.02)
    assert _generation(1, quantization="fp8") < _generation(1)
    # Without FP8 products weights are widened: they are read faster, and multiply no faster.
    ampere = make_cluster("A100-80", 1)
    many = [step_model(work, ampere, 1, 1)(np.array([4096.0]), 1.0)[0] for work in (whole, half)]
    assert many[1] == pytest.approx(many[0], rel=0.01)


def test_servers_in_fp8_hold_less_and_cache_more() -> None:
    whole, half = (workload(QWEN_7B, quantization=each) for each in (None, "fp8"))
    vocabulary = 2 * 152064 * 3584
    layers = model_sizes(QWEN_7B).total - vocabulary
    assert whole.served_weights == model_sizes(QWEN_7B).total * 2
    assert half.served_weights == layers + vocabulary * 2
    one, cluster = servers(8, 2, 0.5), make_cluster("H100", 1)
    wide, narrow = (server_bytes(QWEN_7B, one, cluster, 2, work.served_weights) for work in (whole, half))
    assert wide.weights[0] - narrow.weights[0] == narrow.cache[0] - wide.cache[0] == layers / 2
    assert narrow.cache_tokens[0] > wide.cache_tokens[0]


def test_tiles_make_decode_attention_of_an_h20_slower_than_its_memory() -> None:
    work, h20 = workload(QWEN_7B), make_cluster("H20", 1)
    whole = replace(h20, device=replace(h20.device, tile_rows=1))
    near, far = (step_model(work, each, 1, 1) for each in (h20, whole))
    extra = near(np.array([64.0]), 4000.0)[0] - near(np.array([64.0]), 1.0)[0]
    memory = far(np.array([64.0]), 4000.0)[0] - far(np.array([64.0]), 1.0)[0]
    assert 1.5 < extra / memory < 2.5
    h100 = make_cluster("H100", 1)
    narrow = replace(h100, device=replace(h100.device, tile_rows=1))
    assert step_model(work, h100, 1, 1)(np.array([64.0]), 4000.0) == pytest.approx(
        step_model(work, narrow, 1, 1)(np.array([64.0]), 4000.0)
    )


def test_launching_is_hidden_behind_large_micro_batches_where_the_host_runs_ahead() -> None:
    work, h100 = workload(QWEN_7B, mini_batches=1), make_cluster("H100", 1)
    large, small = (score_seconds(QWEN_7B, choice(8, micro=micro), work, h100).launch[0] for micro in (32768, 2048))
    assert large == 0.0
    slow = with_rates(h100, {"layer_s": 0.05})
    assert score_seconds(QWEN_7B, choice(8, micro=2048), work, slow).launch[0] > small
    waits = replace(slow, device=replace(slow.device, queues=False))
    assert score_seconds(QWEN_7B, choice(8, micro=32768), work, waits).launch[0] > 0
