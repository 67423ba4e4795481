"""Sizes, bytes and seconds: hand-computed figures, and what must grow or shrink with what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.layout import Layout
from megarl.models.config import Mla
from megarl.models.known_configs import known_config
from megarl.placement.cluster import make_cluster
from megarl.placement.compute import batches, core_share, score_seconds, update_seconds
from megarl.placement.devices import GIB
from megarl.placement.generation import rollout_seconds, step_model
from megarl.placement.lengths import counted, lognormal
from megarl.placement.links import all_gather_s, all_to_all_s, group_bytes_s
from megarl.placement.memory import Role, role_bytes, server_bytes
from megarl.placement.sizes import kv_bytes, model_sizes
from megarl.placement.space import RECOMPUTE, Layouts, Servers, one_layout
from megarl.placement.tables import price_rollout
from megarl.placement.workload import read_model
from megarl.recipe.roles import Lora
from tests.placement.samples import LATENT, LLAMA_7B, QWEN_7B, QWEN_30B_A3B, workload

CLUSTER = make_cluster("H100", 4)


def choice(
    devices: int, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, micro: int = 8192, again: int = 0, **more: int
) -> Layouts:
    layout = Layout(tp=tp, pp=pp, cp=cp, ep=ep, world_size=devices, **more)  # type: ignore[arg-type]
    return one_layout(layout, micro, RECOMPUTE[again])


def servers(devices: int, tp: int, share: float) -> Servers:
    return Servers(np.array([devices]), np.array([tp]), np.array([share]), np.array([devices]))


def test_parameters_are_those_of_the_published_models() -> None:
    assert model_sizes(LLAMA_7B).total == pytest.approx(6.738e9, rel=1e-3)
    assert model_sizes(QWEN_7B).total == pytest.approx(7.616e9, rel=1e-3)
    assert model_sizes(QWEN_30B_A3B).total == pytest.approx(30.53e9, rel=1e-3)
    assert model_sizes(LLAMA_7B, head=False).total == pytest.approx(6.738e9 - 32000 * 4096, rel=1e-3)


def test_bytes_of_mixed_precision_by_hand() -> None:
    # 6.738e9 parameters over tp 2: 2 bytes of weights, 4 of gradients, 12 of state over 4 data-parallel ranks.
    held = role_bytes(LLAMA_7B, choice(8, tp=2), 2, Role(trained=True, head=True))
    own = model_sizes(LLAMA_7B).total / 2
    assert held.weights[0] == pytest.approx(own * 2)
    assert held.gradients[0] == pytest.approx(own * 4)
    assert held.optimizer[0] == pytest.approx(own * 12 / 4)
    whole = role_bytes(LLAMA_7B, choice(8, tp=2), 2, Role(trained=True, head=True, sharded=False))
    assert whole.optimizer[0] == pytest.approx(own * 12) and whole.state[0] == pytest.approx(own * 18)
    in_float32 = role_bytes(LLAMA_7B, choice(8, tp=2), 4, Role(trained=True, head=True))
    assert in_float32.optimizer[0] == pytest.approx(own * 8 / 4)
    frozen = role_bytes(LLAMA_7B, choice(8, tp=2), 2, Role(trained=False, head=True))
    assert frozen.gradients[0] == frozen.optimizer[0] == 0


def test_key_value_cache_by_hand() -> None:
    assert kv_bytes(QWEN_7B, np.array([1]), 2)[0] == 2 * 28 * 4 * 128 * 2
    assert kv_bytes(QWEN_7B, np.array([8]), 2)[0] == 2 * 28 * 1 * 128 * 2
    assert kv_bytes(LATENT, np.array([4]), 2)[0] == 4 * (128 + 16) * 2


def test_a_servers_ranks_each_hold_routers_and_compressions_whole() -> None:
    path = known_config(Path("deepseek-ai/DeepSeek-V3"))
    assert path is not None
    config = read_model(path.parent)
    # 61 layers compress into 1,536 and 512 + 64; 58 choose among 256 experts.
    uncut = 7168 * (61 * (1536 + 576) + 58 * 256)
    weights = server_bytes(config, servers(32, 16, 0.9), CLUSTER, 2).weights[0]
    assert weights == pytest.approx(2 * (uncut + (model_sizes(config).total - uncut) / 16))
    assert weights > 1.02 * 2 * model_sizes(config).total / 16
    assert server_bytes(QWEN_7B, servers(8, 4, 0.9), CLUSTER, 2).weights[0] == model_sizes(QWEN_7B).total * 2 / 4


def test_a_sleeping_server_keeps_what_it_holds_beside_weights_and_cache() -> None:
    """By hand, in GiB: metadata, 256 decode graphs, 58 of prompts, logits, a layer of a prompt, context; more for each rank."""
    by_hand = 0.5 + 256 * 2 / 1024 + 58 * 8 / 1024 + 256 * 152064 * 4 / GIB + 0.6 + 0.5
    kept = {}
    for tp in (1, 4, 8):
        choice = servers(8, tp, 0.75)
        table = price_rollout(choice, np.array([True]), workload(QWEN_7B), CLUSTER)
        kept[tp] = table.separate.rest[0] / GIB
        held = server_bytes(QWEN_7B, choice, CLUSTER, 2)
        assert held.other[0] > table.separate.rest[0], "it holds no less awake"
        assert held.total[0] == pytest.approx((0.75 * (79.5 - (tp - 1) / 8) + 3 + (tp - 1) / 8) * GIB)
        assert table.separate.rest[0] + table.separate.extra[0] == pytest.approx(held.total[0])
    assert kept[1] == pytest.approx(by_hand + 1 / 8, rel=0.05)
    assert (kept[4] - kept[1], kept[8] - kept[1]) == pytest.approx((3 / 8, 7 / 8))


def test_rings_use_every_network_device_of_their_ranks() -> None:
    device, rates = CLUSTER.device, CLUSTER.rates
    inside = device.inside_bytes_s * rates.links
    network = device.between_bytes_s * rates.network
    assert group_bytes_s(CLUSTER, 8, 1) == inside
    assert group_bytes_s(CLUSTER, 4, 8) == network
    assert group_bytes_s(CLUSTER, 8, 4) == 2 * network
    assert all_gather_s(CLUSTER, 1e9, 4, 8) == pytest.approx(0.75e9 / network + 2 * rates.hop_s)


@given(devices=st.sampled_from([8, 16, 32]), tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2]))
def test_more_devices_never_slow_a_pass_down(devices: int, tp: int, pp: int) -> None:
    work = workload(QWEN_7B)
    few = score_seconds(QWEN_7B, choice(devices, tp, pp), work, CLUSTER).total[0]
    many = score_seconds(QWEN_7B, choice(2 * devices, tp, pp), work, CLUSTER).total[0]
    assert many <= few * 1.001


def test_an_update_multiplies_three_times_and_recompute_a_fourth() -> None:
    work = workload(QWEN_7B, mini_batches=1)
    one = score_seconds(QWEN_7B, choice(8, 2), work, CLUSTER).compute[0]
    update = update_seconds(QWEN_7B, choice(8, 2), work, CLUSTER).compute[0]
    # Beside them attention's backward pass takes longer than two forward ones, and gradients are added up.
    assert 3 * one < update < 3.3 * one
    again = update_seconds(QWEN_7B, choice(8, 2, again=2), work, CLUSTER).compute[0]
    some = update_seconds(QWEN_7B, choice(8, 2, again=1), work, CLUSTER).compute[0]
    seven = replace(choice(8, 2, again=2), recomputed=np.array([7]))
    assert update_seconds(QWEN_7B, seven, work, CLUSTER).compute[0] == pytest.approx(update + (again - update) / 4)
    # All layers once more, but not the vocabulary's product.
    assert update + 0.8 * one < again < update + one
    assert update < some < update + 0.1 * one


def test_an_update_of_adapters_multiplies_twice_and_moves_their_gradients_alone() -> None:
    work = workload(QWEN_7B, mini_batches=1)
    one = score_seconds(QWEN_7B, choice(8, 2), work, CLUSTER)
    lora = Lora()
    whole, some = (update_seconds(QWEN_7B, choice(8, 2), work, CLUSTER, lora=each) for each in (None, lora))
    # Forward, and backward for the inputs alone (as models/flops has it); attention's backward pass is longer.
    assert 2 * one.compute[0] < some.compute[0] < 2.5 * one.compute[0]
    assert some.tensor[0] == pytest.approx(2 * one.tensor[0])
    # Each of 4 copies sends 3/4 of 4 + 2 bytes for each number that is trained on its rank.
    hidden, mixed = 3584, (28 + 2 * 4) * 128
    trained = 28 * 32 * ((hidden + mixed / 2) + (hidden / 2 + hidden))
    rate = CLUSTER.device.inside_bytes_s * CLUSTER.rates.links
    hops = whole.gradients[0] - 0.75 * 6 * (model_sizes(QWEN_7B).total / 2) / rate
    assert some.gradients[0] - hops == pytest.approx(0.75 * 6 * trained / rate)
    fixed = CLUSTER.rates.update_s
    assert some.optimizer[0] - fixed < (whole.optimizer[0] - fixed) / 100


def test_an_update_of_adapters_takes_less_with_experts_too() -> None:
    work = workload(QWEN_30B_A3B, mini_batches=1)
    whole, some = (update_seconds(QWEN_30B_A3B, choice(8, ep=8), work, CLUSTER, lora=each) for each in (None, Lora()))
    assert some.compute[0] < 0.9 * whole.compute[0]
    assert some.gradients[0] < whole.gradients[0] / 5


def test_ranks_that_share_an_experts_columns_gather_each_others_rows_and_scatter_their_sums() -> None:
    """As Megatron's dispatcher has it: sent to the experts' ranks, gathered there; the outputs scattered, and sent back."""
    work, cluster = workload(QWEN_30B_A3B), make_cluster("H100", 1)
    shared = one_layout(Layout(ep=4, etp=2, world_size=8), 8192)
    dealt = batches(work.samples, work, shared)
    rows = dealt.tokens * 8 * 2048 * 2
    layer = 2 * all_to_all_s(cluster, rows, 4, 2) + 2 * all_gather_s(cluster, 2 * rows, 2, 1)
    assert score_seconds(QWEN_30B_A3B, shared, work, cluster).expert == pytest.approx(dealt.count * 48 * layer)
    # Twice four neighbours are on two nodes.
    far = replace(cluster, nodes=2, devices_per_node=4)
    assert score_seconds(QWEN_30B_A3B, shared, work, far).expert > 3 * dealt.count * 48 * layer


def test_a_latent_is_read_once_and_multiplied_as_key_and_as_value() -> None:
    # As wide as DeepSeek-V3's. Few bytes and many heads on a device with little arithmetic: multiplying is what takes long.
    config = replace(LATENT, num_heads=128, mla=Mla(None, 512, 128, 64, 128))
    cluster = make_cluster("H20", 1)
    step = step_model(workload(config, roles=("actor", "rollout")), cluster, 8, 1)
    batch = np.array([64.0])
    more = step(batch, 5000)[0] - step(batch, 1000)[0]
    # 16 heads a rank share a tile of 64 rows; scores over 512 + 64, sums over 512.
    flops = 64 * 4000 * config.num_layers * 64 * 2 * (576 + 512)
    reached = cluster.device.product_flops("bfloat16") * cluster.rates.attention
    assert more == pytest.approx(flops / reached)


def test_a_pipeline_waits_for_its_ends() -> None:
    work = workload(QWEN_7B, mini_batches=1)
    two = update_seconds(QWEN_7B, choice(8, pp=2), work, CLUSTER)
    count = batches(work.samples, work, choice(8, pp=2)).count[0]
    rest = two.work[0] - two.bubble[0] - two.gradients[0] - two.optimizer[0]
    # The last rank has as many layers as the first, and the vocabulary's product.
    assert 0.7 * rest / count < two.bubble[0] < rest / count


def test_the_heaviest_rank_has_the_longest_sample() -> None:
    work = workload(samples_per_prompt=1, prompts=16)
    one_each = batches(16, work, choice(16))
    assert one_each.tokens[0] == pytest.approx(512 + work.responses.longest_of(16))


def test_whole_samples_are_dealt_so_that_one_rank_has_more() -> None:
    work = replace(workload(), responses=lognormal(1023.9, 0.0, 1024))
    # 128 samples of 512 + 1,024 tokens over 12 ranks: one has 11 of them.
    assert batches(128, work, choice(12)).tokens[0] * batches(128, work, choice(12)).count[0] == pytest.approx(
        11 * 1536, rel=1e-3
    )
    assert batches(120, work, choice(12)).tokens[0] * batches(120, work, choice(12)).count[0] == pytest.approx(
        10 * 1536, rel=1e-3
    )


def test_an_optimizer_that_is_not_shared_out_reads_all_of_its_state_and_sums_whole_gradients() -> None:
    shared, whole = (
        update_seconds(QWEN_7B, choice(16, tp=2), replace(workload(QWEN_7B), shards_optimizer=shards), CLUSTER)
        for shards in (True, False)
    )
    assert whole.optimizer[0] > shared.optimizer[0]
    # 4 + 4 bytes a parameter instead of 4 + 2, beside hops that are the same.
    assert whole.gradients[0] / shared.gradients[0] == pytest.approx(8 / 6, rel=0.02)
    assert whole.compute[0] == shared.compute[0]


def test_processes_that_share_cores_slow_each_other_down_but_wait_side_by_side() -> None:
    work, many = workload(QWEN_7B, mini_batches=1), replace(CLUSTER, nodes=1)
    shared = replace(many, rates=replace(many.rates, at_once=4.0))
    alone, both = (update_seconds(QWEN_7B, choice(8, tp=2), work, cluster) for cluster in (many, shared))
    assert both.compute[0] == pytest.approx(2 * alone.compute[0])
    assert both.launch[0] == pytest.approx(2 * alone.launch[0])
    assert both.tensor[0] == alone.tensor[0]
    # A pipeline's bubble is time in which others have the core.
    alone, both = (update_seconds(QWEN_7B, choice(8, pp=4), work, cluster) for cluster in (many, shared))
    assert alone.bubble[0] > 0
    assert both.bubble[0] < alone.bubble[0]
    assert core_share(np.array([2, 8]), shared).tolist() == [0.5, 1.0]
    assert core_share(np.array([2, 8]), many).tolist() == [0.0, 0.0]


def test_samples_that_may_be_older_fill_the_servers() -> None:
    one = servers(8, 1, 0.8)
    held = server_bytes(QWEN_7B, one, CLUSTER, 2)
    flows = [
        float(rollout_seconds(QWEN_7B, one, held, workload(QWEN_7B, prompts=128, staleness=old), CLUSTER).flow[0])
        for old in (0, 1, 3)
    ]
    assert flows[0] > flows[1] > flows[2]


def test_servers_that_are_asked_for_few_at_once_generate_in_turns() -> None:
    """Eight servers that could each decode all of their 128 samples at once."""
    one = servers(8, 1, 0.8)
    held = server_bytes(QWEN_7B, one, CLUSTER, 2)
    priced = {
        asked: rollout_seconds(QWEN_7B, one, held, workload(QWEN_7B, prompts=1024, in_flight=asked), CLUSTER)
        for asked in (None, 1024, 512, 1)
    }
    assert {asked: float(each.running[0]) for asked, each in priced.items()} == {None: 128, 1024: 128, 512: 64, 1: 1}
    assert priced[None].total[0] == priced[1024].total[0] < priced[512].total[0] < priced[1].total[0]


def test_rollout_is_bound_by_cache_then_by_the_longest_response() -> None:
    work = workload(QWEN_7B)

    def total(devices: int, tp: int, share: float) -> float:
        one = servers(devices, tp, share)
        held = server_bytes(QWEN_7B, one, CLUSTER, 2)
        return float(rollout_seconds(QWEN_7B, one, held, work, CLUSTER).total[0])

    assert total(8, 1, 0.9) <= total(8, 1, 0.4)
    assert total(16, 1, 0.6) < total(8, 1, 0.6)
    assert total(8, 1, 0.15) == np.inf
    # However many servers: one sequence decodes its weights' bytes over and over.
    floor = 1000 * model_sizes(QWEN_7B).total * 2 * 0.9 / CLUSTER.device.memory_bytes_s
    assert total(32, 1, 0.9) > floor


def test_decode_of_equal_lengths_by_hand() -> None:
    work = workload(QWEN_7B, prompts=8, responses=lognormal(999, 0.0, 1000), prompt_tokens=1.0)
    one = servers(8, 1, 0.9)
    seconds = rollout_seconds(QWEN_7B, one, server_bytes(QWEN_7B, one, CLUSTER, 2), work, CLUSTER)
    rates, memory = CLUSTER.rates, CLUSTER.device.memory_bytes_s * CLUSTER.rates.memory
    weights = (model_sizes(QWEN_7B).total - 152064 * 3584) * 2 / memory
    cache = 500 * kv_bytes(QWEN_7B, np.array([1]), 2)[0] / memory
    step = weights + cache + 28 * rates.decode_layer_s + rates.decode_s + rates.decode_request_s
    assert seconds.tail[0] == pytest.approx(999 * step, rel=0.01)
    assert seconds.full[0] == 0


def test_short_sequences_take_what_they_are_padded_with() -> None:
    """Of tp 8 and cp 2 to a multiple of 32: by 15.5 tokens on average: each length is as likely as another."""
    layout = Layout(world_size=16, tp=8, cp=2, sequence_parallel=True)
    lengths = np.arange(129, 257)
    padding = float((-lengths % layout.sequence_multiple).mean())
    padded = one_layout(layout, 4096)
    assert padded.padding[0] == 15.5 == padding
    assert one_layout(Layout(world_size=1), 4096).padding[0] == 0
    work = workload(LLAMA_7B, prompt_tokens=0.0, responses=counted([200], 200))
    dealt = batches(work.samples, work, padded)
    assert dealt.tokens[0] * dealt.count[0] == pytest.approx(work.samples * 215.5)
    plain, short = (role_bytes(LLAMA_7B, padded, 2, Role(True, True, mean=mean)) for mean in (None, 200.0))
    assert short.activations[0] / plain.activations[0] == pytest.approx(215.5 / 200, rel=0.005)
    assert short.state == plain.state
