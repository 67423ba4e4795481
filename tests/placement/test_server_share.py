"""A server's share of a device, by hand and as SGLang's own choice of it goes (held against SGLang in
tests/serving/test_cuda_flags.py)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.placement.cluster import make_cluster
from megarl.placement.devices import GIB
from megarl.placement.memory import server_bytes
from megarl.placement.recipe_plan import predict_recipe
from megarl.placement.server_share import chosen_share, share_bytes, sharing
from megarl.placement.sizes import model_sizes
from megarl.placement.space import Servers
from megarl.placement.workload import ROLLOUT, read_model, recipe_workload
from tests.placement.samples import LATENT, QWEN_7B, write_config
from tests.placement.test_apply import LARGE, recipe

H100 = make_cluster("H100", 1)


def servers(tp: int, share: float) -> Servers:
    return Servers(np.array([8]), np.array([tp]), np.array([share]), np.array([8]))


@pytest.mark.parametrize("tp", [1, 4])
def test_weights_and_cache_are_the_share_of_what_was_free_and_the_rest_is_beside_it(tp: int) -> None:
    """SGLang 0.5.21: cache = free now - (free before the weights) x (1 - share); by then context and communicators are there."""
    share, weights = 0.75, model_sizes(QWEN_7B).total * 2 / tp
    before = 80 * GIB - (0.5 + (tp - 1) / 8) * GIB
    cache = (before - weights) - before * (1 - share)
    held = server_bytes(QWEN_7B, servers(tp, share), H100, 2)
    assert held.cache[0] == pytest.approx(cache) and held.weights[0] == weights
    assert held.total[0] == pytest.approx(share * before + (3 + (tp - 1) / 8) * GIB)


def test_a_share_is_found_by_what_is_held_with_it() -> None:
    choice = servers(4, 0.6)
    held = server_bytes(QWEN_7B, choice, H100, 2)
    assert share_bytes(choice, H100)[0] == pytest.approx(held.weights[0] + held.cache[0])
    assert sharing(servers(4, 1.0), H100, held.total)[0] == pytest.approx(0.6)


def test_a_server_that_holds_less_than_it_starts_with_is_not_taken_for_more() -> None:
    """What a machine measured of its servers, where that is less than what is assumed of their start."""
    lean = replace(H100, rates=replace(H100.rates, server_bytes=0.25 * GIB))
    assert share_bytes(servers(1, 1.0), lean)[0] == 79.75 * GIB


def test_the_share_that_sglang_chooses_by_hand() -> None:
    """In MiB on 80 GiB: 512, 8,192 x 1.5, an eighth of a GiB a rank, 2 for each of 256 sequences, 8 for each of 58 prompts."""
    reserved = 512 + 8192 * 1.5 + 128 + 2 * 256 + 8 * 58
    assert chosen_share(QWEN_7B, 1, H100, 256, None) == round(1 - reserved / 81920, 3) == 0.83
    # A quarter of the ranks' GiB more for tp 8; 1.5 GiB for all graphs of latent attention.
    assert chosen_share(QWEN_7B, 8, H100, 256, None) == round(1 - (reserved + 896) / 81920, 3)
    latent = 512 + 8192 * 1.5 + 128 + 2 * 256 + 1536
    assert chosen_share(LATENT, 1, H100, 256, None) == round(1 - latent / 81920, 3)
    # A cache of 100 tokens: graphs up to 96. On larger devices no less than 10 GiB, on smaller ones shorter chunks.
    few = 512 + 8192 * 1.5 + 128 + 2 * 256 + 8 * 12
    assert chosen_share(QWEN_7B, 1, H100, 256, 100) == round(1 - few / 81920, 3)
    b200 = 512 + 16384 * 1.5 + 128 + 2 * 256 + 8 * 74
    assert chosen_share(QWEN_7B, 1, make_cluster("B200", 1), 256, None) == round(1 - b200 / (178 * 1024), 3)
    l40s = 512 + 4096 * 1.5 + 128 + 2 * 64 + 8 * 50
    assert chosen_share(QWEN_7B, 1, make_cluster("L40S", 1), 64, None) == round(1 - l40s / (48e9 / 2**20), 3)


def test_servers_on_devices_of_their_own_have_the_share_that_sglang_chooses(tmp_path: Path) -> None:
    write_config(tmp_path)
    config = read_model(tmp_path)
    shares = {}
    for nodes in (1, 2):
        words = ("cluster.devices=8", "rollout.servers=8", "rollout.max_running_requests=256", "rollout.kv_tokens=null")
        asked = recipe(tmp_path, *LARGE, *words)
        plan = predict_recipe(asked, recipe_workload(asked, config), make_cluster("H100", nodes))
        [served] = [role for pool in plan.pools for role in pool.roles if role.role == ROLLOUT]
        shares[nodes] = served.choice["memory_share"]
    assert shares == {1: 0.3, 2: 0.83}
