"""What NCCL holds for ranks that send to one another, and grouped products for experts, by hand."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.core.layout import Layout
from megarl.placement.cluster import make_cluster
from megarl.placement.communicators import exchange_bytes, frozen_bytes
from megarl.placement.recipe_plan import predict_recipe
from megarl.placement.space import one_layout
from megarl.placement.tables import held_bytes, price_role
from megarl.placement.workload import read_model, recipe_workload
from tests.placement.samples import GRPO, LLAMA_7B, QWEN_30B_A3B, workload
from tests.placement.test_apply import LARGE, recipe

MIB = 2**20


def held(layout: Layout, device: str = "H100", nodes: int = 4) -> float:
    found: float = exchange_bytes(QWEN_30B_A3B, one_layout(layout, 4096), make_cluster(device, nodes))[0]
    return found / MIB


def test_a_group_within_a_node_has_32_channels_for_each_peer() -> None:
    ring, workspaces = 24 * 12, 4 * 32
    assert held(Layout(tp=2, ep=8, world_size=32)) == 7 * 32 * 12 + 3 * ring + workspaces
    assert held(Layout(ep=4, world_size=4)) == 3 * 32 * 12 + ring + workspaces  # each expert is there once
    assert held(Layout(ep=1, world_size=8)) == ring + workspaces  # nothing is exchanged
    assert held(Layout(ep=8, world_size=8), "L40S", 1) == 7 * 2 * 12 + ring + workspaces


def test_a_group_that_spans_nodes_has_few_and_a_pool() -> None:
    many = held(Layout(tp=4, pp=8, ep=32, world_size=256), nodes=32)
    assert (
        many - 512 == 7 * 4 * 12 + 512 + 2 * 24 * 12 + 4 * 32
    )  # a pool more, for the pipeline; of 8 ranks of a node; each expert is there once
    # Two ranks share an expert's columns: four of the group are on a node.
    assert held(Layout(ep=8, etp=2, tp=2, world_size=16)) == 3 * 4 * 12 + 512 + 2 * 24 * 12 + 4 * 32


def test_pipelines_and_context_parallel_send_to_two_at_most() -> None:
    def dense(layout: Layout, nodes: int = 1) -> float:
        found: float = exchange_bytes(LLAMA_7B, one_layout(layout, 4096), make_cluster("H100", nodes))[0]
        return found / MIB

    assert dense(Layout(cp=2, world_size=8)) == 32 * 12
    assert dense(Layout(cp=4, tp=2, sequence_parallel=True, world_size=8)) == 2 * 32 * 12
    assert dense(Layout(cp=8, tp=2, sequence_parallel=True, world_size=16), 2) == 2 * 4 * 12 + 512
    assert dense(Layout(pp=2, world_size=8)) == 32 * 12
    assert dense(Layout(pp=4, world_size=32), 4) == 512  # a stage is a node


def test_others_hold_nothing() -> None:
    choice = one_layout(Layout(world_size=8), 4096)
    assert exchange_bytes(LLAMA_7B, choice, make_cluster("H100", 1))[0] == 0
    assert exchange_bytes(QWEN_30B_A3B, choice, make_cluster("cpu", 1))[0] == 0


def test_it_stays_while_the_role_is_offloaded() -> None:
    load, cluster = workload(QWEN_30B_A3B, GRPO), make_cluster("H100", 4)
    choice = one_layout(Layout(tp=2, ep=8, sequence_parallel=True, world_size=32), 4096, "full")
    exchange = exchange_bytes(QWEN_30B_A3B, choice, cluster)[0]
    actor = held_bytes("actor", choice, load, cluster)
    assert actor.exchange[0] == exchange and replace(actor, exchange=0.0).state[0] == actor.state[0] - exchange
    assert price_role("actor", choice, np.array([True]), load, cluster).choices.rest[0] > exchange
    assert actor.moved[0] == pytest.approx(actor.weights[0] + actor.optimizer[0])


def test_a_frozen_role_sends_and_sums_nothing_over_copies() -> None:
    cluster = make_cluster("H100", 4)

    def frozen(layout: Layout, config: object = QWEN_30B_A3B) -> float:
        found: float = frozen_bytes(config, one_layout(layout, 4096), cluster)[0]  # type: ignore[arg-type]
        return found / MIB

    ring, workspaces = 24 * 12, 4 * 32
    # Tokens to the experts of seven others; how many each has; tensor parallel.
    assert frozen(Layout(tp=2, ep=8, world_size=32)) == 7 * 32 * 12 + 2 * ring + workspaces
    assert frozen(Layout(world_size=8)) == workspaces
    assert frozen(Layout(tp=4, world_size=8), LLAMA_7B) == ring
    assert frozen(Layout(tp=4, pp=2, cp=2, world_size=16), LLAMA_7B) == ring + 512 + 32 * 12  # a stage is a node
    cpu = frozen_bytes(QWEN_30B_A3B, one_layout(Layout(ep=8, world_size=8), 4096), make_cluster("cpu", 1))
    assert cpu[0] == 0


def test_a_frozen_role_has_groups_of_its_own_where_no_role_beside_it_has_its_layout(tmp_path: Path) -> None:
    """As ranks do: groups are by layout. The critic's are the actor's, where theirs is one."""

    def held(**tp: int) -> dict[str, float]:
        words = [f"{role}.parallel.tp={size}" for role, size in tp.items()]
        asked = recipe(tmp_path, *LARGE, "cluster.devices=8", "actor.parallel.cp=2", *words)
        plan = predict_recipe(asked, recipe_workload(asked, read_model(tmp_path)), make_cluster("H100", 1))
        roles = [role for pool in plan.pools for role in pool.roles if "exchange" in role.held_bytes]
        exchange = {role.role: role.held_bytes["exchange"] / MIB for role in roles}
        # What an offloaded role keeps has it, too.
        assert all(role.offloaded_bytes >= role.held_bytes["exchange"] for role in roles)
        return exchange

    near, ring = 32 * 12, 24 * 12
    same = held()
    assert same["actor"] == near and set(same.values()) == {near, 0}, "the reference's groups are the actor's"
    assert held(reference=4)["reference"] == ring
