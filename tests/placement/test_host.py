"""Memory of nodes' hosts, by hand, and what a plan does where there is too little of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.core.errors import UserError
from megarl.core.layout import Layout
from megarl.models.known_configs import known_config
from megarl.placement.apply import apply_plan, plan_recipe
from megarl.placement.cluster import Cluster, make_cluster, read_cluster
from megarl.placement.devices import GIB
from megarl.placement.host import (
    OFFLOADED,
    RANKS,
    ROUTING,
    SAVE,
    SERVERS,
    fullest_node,
    host_problem,
    host_words,
    role_host,
    server_host,
)
from megarl.placement.local import host_cluster
from megarl.placement.memory import RoleBytes
from megarl.placement.placed import PlacementPlan, PoolPlan, RolePlan
from megarl.placement.plan import make_plan
from megarl.placement.recipe_plan import check_fits, predict_recipe
from megarl.placement.report import as_json
from megarl.placement.space import one_layout
from megarl.placement.workload import read_model, recipe_workload
from megarl.recipe.load import load_recipe
from megarl.recipe.schema import Recipe
from tests.placement.samples import GRPO, QWEN_7B, QWEN_30B_A3B, workload
from tests.placement.test_apply import LARGE, recipe

H100 = make_cluster("H100", 1)
HELD = RoleBytes(*(np.array([float(size)]) for size in (16, 32, 96, 1000, 1000)))


def host(layout: Layout, *, offloaded: bool = False, trained: bool = True, **more: object) -> dict[str, float]:
    choice = one_layout(layout, 2048, "none", None)
    return role_host(HELD, choice, workload(**more), H100, offloaded=offloaded, trained=trained)


@pytest.mark.parametrize(
    ("layout", "more", "saved"),
    [
        (Layout(world_size=8), {}, 96),  # each of eight ranks gathers its share on the host
        (Layout(world_size=8, tp=8), {}, 0),  # one data-parallel rank writes from the device
        (Layout(world_size=8, tp=8), {"async_save": True}, 96 + 16),  # a copy of all
        (Layout(world_size=8), {"async_save": True}, 96 + 16 / 8),  # one of eight writes the weights
        (Layout(world_size=4, tp=2), {"async_save": True}, 96 + 16 * 2 / 4),
        (Layout(world_size=16, tp=4), {"async_save": True}, 96 + 16 * 4 / 8),  # of a node's eight
        (Layout(world_size=8), {"shards_optimizer": False}, 0),
    ],
)
def test_a_save_takes_what_it_gathers_and_what_it_copies(layout: Layout, more: dict[str, object], saved: float) -> None:
    assert host(layout, **more) == {OFFLOADED: 0.0, SAVE: saved}


def test_an_offloaded_role_leaves_weights_and_optimizer_on_the_host_and_no_gradients() -> None:
    assert host(Layout(world_size=8, tp=8), offloaded=True) == {OFFLOADED: 16 + 96, SAVE: 0.0}
    assert host(Layout(world_size=8), offloaded=True, trained=False, async_save=True) == {OFFLOADED: 112, SAVE: 0.0}


def test_servers_keep_the_experts_that_they_chose_for_all_tokens_of_their_cache(tmp_path: Path) -> None:
    """SGLang 0.5.21: 4 bytes a choice, of every layer, for each token that the cache holds, on each rank of a server."""
    layers, chosen = QWEN_30B_A3B.num_layers, 8
    held = server_host(H100, 2, QWEN_30B_A3B, 1000.0)
    assert held == {SERVERS: 2 * H100.rates.host_server_bytes, ROUTING: 2 * 1000 * layers * chosen * 4}
    assert server_host(H100, 2) == server_host(H100, 2, QWEN_7B, 1000.0) == {SERVERS: held[SERVERS]}
    assert server_host(host_cluster(2), 1, QWEN_30B_A3B, 1000.0) == {}

    path = known_config(Path("Qwen/Qwen3-30B-A3B"))
    assert path is not None
    asked = load_recipe(Path("recipes/qwen3_30b_a3b_grpo_32.yaml"), [f"model.path={path.parent}"], Recipe).recipe
    work = recipe_workload(asked, read_model(path.parent))
    plan = predict_recipe(asked, work, make_cluster("H100", 4))
    [served] = [role for pool in plan.pools for role in pool.roles if role.role == "rollout"]
    assert served.host_bytes[ROUTING] == served.choice["kv_tokens"] * 48 * 8 * 4
    assert 2.5 * GIB < served.host_bytes[ROUTING] < 3 * GIB
    assert f"{ROUTING} 2" in host_words(plan)
    without = predict_recipe(asked, replace(work, replays_routing=False), make_cluster("H100", 4))
    assert ROUTING not in fullest_node(without.pools)[0]


def test_processes_that_stand_for_devices_have_no_other_memory(tmp_path: Path) -> None:
    assert server_host(host_cluster(2), 3) == {}
    small = recipe(tmp_path)
    plan = check_fits(small, recipe_workload(small, QWEN_7B), _vast())
    assert host_words(plan) == ""


def _vast() -> Cluster:
    here = host_cluster(1)
    return replace(here, device=replace(here.device, memory_bytes=1e13))


def pool(devices: int, kind: Cluster, **roles: float) -> PoolPlan:
    return PoolPlan(
        devices,
        0,
        tuple(RolePlan(name, "", {}, {}, {}, 0.0, {}, {OFFLOADED: held}) for name, held in roles.items()),
        0.0,
        "",
        kind,
    )


def test_the_fullest_node_has_its_share_of_every_pool() -> None:
    two = make_cluster("H100", 2, 4)
    rank = two.rates.host_rank_bytes
    # Node 0: three of the first pool, one of the second; node 1: two of the second, and two of nobody.
    much = 100.0 * GIB
    held, kind = fullest_node([pool(3, two, actor=10.0, reference=1.0), pool(3, two, critic=much)])
    assert kind == two and held == {OFFLOADED: 2 * much, RANKS: 2 * rank}
    held, _ = fullest_node([pool(3, two, actor=100.0, reference=1.0), pool(3, two, critic=10.0)])
    assert held == {OFFLOADED: 3 * 101 + 10, RANKS: 4 * rank}
    # A pool of servers alone has no ranks; nodes of another kind are others.
    other = make_cluster("H20", 1, 4)
    held, kind = fullest_node([pool(4, two, rollout=1.0), pool(4, other, actor=1.0)])
    assert kind == other and held == {OFFLOADED: 4, RANKS: 4 * other.rates.host_rank_bytes}


def test_a_pool_of_many_nodes_is_looked_at_where_it_ends_and_once_between(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[PoolPlan] = []

    def counted(each: PoolPlan) -> list[tuple[str, float]]:
        looked.append(each)
        return [(OFFLOADED, each.roles[0].host_bytes[OFFLOADED])]

    monkeypatch.setattr("megarl.placement.host._of_device", counted)
    many = make_cluster("H100", 100_000)
    # Beside the first pool's last two devices the second has six of a node; it has all of those between, and two at its end.
    pools = [pool(10, many, actor=5.0), pool(400_000, many, critic=1.0), pool(8, many, reference=2.0)]
    assert fullest_node(pools)[0] == {OFFLOADED: 40.0}
    assert len(looked) <= 3 * len(pools)
    assert fullest_node([pool(2, many, actor=0.5), *pools[1:2]])[0] == {OFFLOADED: 8.0}


def test_of_several_kinds_the_node_that_lacks_is_the_fullest() -> None:
    roomy, poor = replace(H100, host_bytes=1000 * GIB), replace(make_cluster("H20", 1), host_bytes=100 * GIB)
    pools = [pool(8, roomy, rollout=100.0 * GIB), pool(8, poor, rollout=20.0 * GIB)]
    held, kind = fullest_node(pools)
    assert kind == poor and held == {OFFLOADED: 160 * GIB}
    assert "160.0 of 100 GiB" in (host_problem(PlacementPlan(("split",), False, tuple(pools), 1.0, {})) or "")
    # What is held by nodes that lack nothing, or of which nobody knows, does not count.
    assert host_problem(PlacementPlan(("split",), False, tuple(pools[:1]), 1.0, {})) is None
    mixed = replace(H100, host_bytes=2000 * GIB, others=(replace(make_cluster("H200", 1), host_bytes=10 * GIB),))
    plan = make_plan(workload(QWEN_7B, GRPO), mixed)
    assert {each.kind.device.name for each in plan.best.pools} == {"H100"}


def test_a_plan_passes_over_what_a_host_does_not_hold() -> None:
    work = workload(QWEN_7B, GRPO)
    free = make_plan(work, H100, name="colocate")
    held, _ = fullest_node(free.best.pools)
    needs = sum(held.values())
    assert held[SERVERS] == held[RANKS] * 6 / 4 and as_json(free)["best"]["host_bytes"] == held
    assert make_plan(work, replace(H100, host_bytes=needs + GIB), name="colocate").best.step_s == free.best.step_s
    less = make_plan(work, replace(H100, host_bytes=needs - GIB))
    assert sum(fullest_node(less.best.pools)[0].values()) <= needs - GIB
    with pytest.raises(
        UserError, match=r"fits into the hosts' memory: of .*host memory of the fullest node: .* of 8 GiB"
    ):
        make_plan(work, replace(H100, host_bytes=8 * GIB))


def test_a_recipe_is_refused_where_its_nodes_do_not_hold_what_it_offloads(tmp_path: Path) -> None:
    before = recipe(tmp_path, *LARGE)
    work = recipe_workload(before, read_model(tmp_path))
    plan = plan_recipe(before, work, H100, "colocate")
    after = apply_plan(before, plan)
    assert check_fits(after, work, replace(H100, host_bytes=2000 * GIB)).step_s > 0
    with pytest.raises(
        UserError, match=r"does not fit into memory: the host memory of the fullest node: \d+.* of 60 GiB"
    ):
        check_fits(after, work, replace(H100, host_bytes=60 * GIB))


def test_a_cluster_file_says_what_hosts_have(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("nodes: 2\ndevice: H100\nhost_memory_gib: 1024\n")
    assert read_cluster(file).host_bytes == 1024 * GIB
    file.write_text("nodes:\n  - {device: H100, count: 1}\n  - {device: H20, count: 2, host_memory_gib: 512}\n")
    assert [kind.host_bytes for kind in read_cluster(file).kinds] == [None, 512 * GIB]
