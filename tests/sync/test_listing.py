"""`megarl plan --sync`: what it shows of a recipe, and where a recipe's ranks and servers stand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megarl.command_line import app
from megarl.core.errors import UserError
from megarl.models.known_configs import known_config
from megarl.placement.cluster import Cluster, make_cluster
from megarl.placement.workload import read_model
from megarl.recipe.load import load_recipe
from megarl.recipe.schema import Recipe
from megarl.recipe.servers import ExternalServers
from megarl.sync.places import plan_of
from megarl.sync.plan import GLOO_BUCKET_BYTES, SyncPlan, planned_bytes

LLAMA = "recipes/llama31_70b_ppo_128.yaml"
APART = (
    "cluster.devices=64",
    "rollout.tp=4",
    "rollout.offload=[]",
)  # its servers on devices of their own, where there are
FOLDER = known_config("Qwen/Qwen3-4B")
EXTERNAL = ExternalServers(urls=("http://127.0.0.1:1", "http://127.0.0.1:2"))


def plan(cluster: Cluster, *overrides: str, servers: ExternalServers | None = None) -> SyncPlan:
    assert FOLDER is not None
    recipe = load_recipe(Path(LLAMA), [*APART, *overrides], Recipe).recipe
    if servers is not None:
        recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"servers": servers, "tp": 1})})
    return plan_of(recipe, read_model(FOLDER.parent), cluster)


def show(*words: str, recipe: str = LLAMA) -> str:
    apart = APART if recipe == LLAMA else ()
    options = ["--device", "H100", "--sync", *apart, *words]
    result = CliRunner().invoke(app, ["plan", recipe, *options], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_recipes_senders_seconds_and_first_rows_are_shown() -> None:
    text = show("--nodes", "16")
    assert "by broadcast; every stage and expert-parallel rank sends its own" in text
    assert "141.1 GB in 723 tensors and 306 buckets of at most 2,004 MiB, to 16 servers; actor tp8 pp4" in text
    assert "0.507 s; bound 0.353 s, ratio 1.44" in text
    assert "and 16 more" in text and text.count("all 16 servers") == 20


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (
            ("cluster.devices=48", "actor.parallel.tp=3", "placement.pools={}"),
            "tp 3 does not divide 64 attention heads",
        ),
        (("rollout.tp=3",), "rollout.tp 3 does not divide the model"),
    ],
)
def test_what_the_model_cannot_be_cut_into_is_refused_as_a_run_refuses_it(words: tuple[str, ...], part: str) -> None:
    result = CliRunner().invoke(app, ["plan", LLAMA, "--device", "H100", "--nodes", "16", "--sync", *APART, *words])
    assert isinstance(result.exception, UserError) and part in str(result.exception)


def test_programs_get_every_row() -> None:
    found: dict[str, Any] = json.loads(show("--nodes", "16", "--json").splitlines()[-1])
    assert found["transport"] == "broadcast" and len(found["senders"]) == 32
    assert sum(row[found["columns"].index("bytes")] for row in found["rows"]) == found["bytes"]
    assert sum(sender["bytes"] for sender in found["senders"]) == found["bytes"]
    assert found["predicted"]["ratio"] == pytest.approx(1.44, abs=0.01)
    assert found["receivers"][-1]["nodes"] == [15, 15, 15, 15]


def test_servers_share_the_first_pools_devices_where_there_are_no_others() -> None:
    shared = plan(make_cluster("H100", 8))
    assert shared.transport == "shared_memory" and shared.hosts == tuple(range(64))
    assert shared.receivers[1].ranks == (4, 5, 6, 7) and shared.receivers[2].nodes == (1, 1, 1, 1)
    first, second = "{devices: 64, roles: [critic, reward_model]}", "{devices: 64, roles: [actor, reference]}"
    pools = f"placement.pools={{first: {first}, second: {second}}}"
    others = plan(make_cluster("H100", 16), pools, "cluster.devices=128")
    assert others.trainer.nodes[0] == 8 and others.receivers[0].nodes == (0, 0, 0, 0)
    assert others.transport == "broadcast" and not others.receivers[0].ranks, "none of the actor's ranks is beside it"


def test_where_processes_stand_for_devices_servers_are_on_the_ranks_node() -> None:
    found = plan(make_cluster("cpu", 1, 64))
    assert found.transport == "shared_memory" and found.hosts == (0,) and len(found.served(0)) == 16
    assert found.trainer.spec == "torch"


@pytest.mark.parametrize(("nodes", "each", "servers_on"), [(2, 64, {1}), (3, 64, {1, 2}), (4, 16, {0, 1, 2, 3})])
def test_over_several_nodes_without_devices_weights_are_broadcast(nodes: int, each: int, servers_on: set[int]) -> None:
    """Servers are on the nodes without ranks, or on all."""
    found = plan(make_cluster("cpu", nodes, each))
    assert found.transport == "broadcast" and {node for each in found.receivers for node in each.nodes} == servers_on
    with pytest.raises(UserError, match=r"sync\.transport is shared_memory, but .* nodes"):
        plan(make_cluster("cpu", nodes, each), "sync.transport=shared_memory")


def test_servers_that_somebody_else_started_are_on_other_nodes() -> None:
    for cluster in (make_cluster("H100", 8), make_cluster("cpu", 1, 64)):
        found = plan(cluster, servers=EXTERNAL)
        assert found.transport == "broadcast" and len(found.receivers) == 2
        assert not {node for each in found.receivers for node in each.nodes} & set(found.trainer.nodes)


def test_too_few_devices_are_refused_with_what_is_needed() -> None:
    result = CliRunner().invoke(app, ["plan", LLAMA, "--device", "H100", "--nodes", "4", "--sync", *APART])
    assert result.exit_code != 0
    assert "ranks take 64 devices, and there are 32" in str(result.exception)
    assert "128 devices for ranks and servers, or 64 that they share" in str(result.exception)


def test_a_placement_that_is_searched_for_is_the_one_that_is_shown() -> None:
    words = ["recipes/quickstart.yaml", "model.path=models/Qwen3-4B", "--device", "H100", "--sync", "--json"]
    for name, transport in (("split", "broadcast"), ("colocate", "shared_memory")):
        result = CliRunner().invoke(app, ["plan", *words, f"placement.name={name}"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout.splitlines()[-1])["transport"] == transport


def test_a_broadcast_is_planned_as_it_is_sent_through_the_host() -> None:
    """By gloo, in smaller buckets, and nobody helps: without devices, to servers on ranks' devices, or whose NCCL is fixed."""
    sent = planned_bytes(GLOO_BUCKET_BYTES, plan(make_cluster("H100", 16)).trainer.layout)
    broadcast = "sync.transport=broadcast"
    for cluster, overrides in (
        (make_cluster("cpu", 1, 128), (broadcast,)),
        (make_cluster("H100", 8), (broadcast,)),
        (make_cluster("H100", 16), (broadcast, "rollout.deterministic=true", "rollout.kv_tokens=786432")),
    ):
        found = plan(cluster, *overrides)
        assert found.bucket_bytes == sent and not any(found.helpers(sender) for sender in found.sent_bytes)
    for cluster, servers in ((make_cluster("H100", 16), None), (make_cluster("H100", 8), EXTERNAL)):
        found = plan(cluster, broadcast, servers=servers)
        assert found.bucket_bytes > sent and all(len(found.helpers(sender)) == 7 for sender in found.sent_bytes)


def test_files_have_no_helpers() -> None:
    found = json.loads(show("--nodes", "16", "--json", "sync.transport=disk").splitlines()[-1])
    assert not any(sender["helpers"] for sender in found["senders"])


FP8_BYTES = ("rollout.quantization=fp8", "model.dtype=bfloat16")


def test_files_are_planned_and_priced() -> None:
    found = json.loads(show("--nodes", "16", "--json", "sync.transport=disk").splitlines()[-1])
    assert (found["transport"], found["quantized"]) == ("disk", False) and len(found["senders"]) == 32
    # Four nodes have the first copy of 141 GB, and write at 1 GB/s each; every node of servers reads all, and writes it down.
    assert found["predicted"]["seconds"] == pytest.approx(found["bytes"] / 1e9 * (1 / 4 + 2), rel=0.03)
    assert "every sender writes its own files" in show("--nodes", "16", "sync.transport=disk")


def test_what_is_sent_in_fp8_is_priced_so_and_never_through_shared_memory() -> None:
    whole, half = (
        json.loads(show("--nodes", "16", "--json", *overrides).splitlines()[-1]) for overrides in ((), FP8_BYTES)
    )
    assert half["quantized"] and half["bytes"] == whole["bytes"]
    assert 0.5 < half["predicted"]["send_s"] / whole["predicted"]["send_s"] < 0.55
    assert half["predicted"]["gather_s"] > whole["predicted"]["gather_s"]
    assert "in FP8, which senders make of these bytes" in show("--nodes", "16", *FP8_BYTES)
    assert plan(make_cluster("H100", 8)).transport == "shared_memory"
    assert plan(make_cluster("H100", 8), *FP8_BYTES).transport == "broadcast"
    with pytest.raises(UserError, match="to auto or broadcast, which works everywhere"):
        plan(make_cluster("H100", 16), "sync.transport=shared_memory")


def test_adapters_alone_are_one_folder(tmp_path: Path) -> None:
    assert FOLDER is not None
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"""\
model: {{path: {FOLDER.parent}}}
data: {{train: nowhere.jsonl}}
actor: {{lora: {{rank: 8, targets: [linear_qkv]}}}}
sync: {{lora: adapters}}
rollout: {{prompts_per_step: 4, samples_per_prompt: 4, max_response_tokens: 12}}
train: {{steps: 2}}
"""
    )
    found = json.loads(show("--json", recipe=str(recipe)).splitlines()[-1])
    # 36 layers of queries of 4,096 and keys and values of 1,024, from 2,560, in bfloat16.
    assert found["bytes"] == 2 * 36 * 8 * ((2560 + 4096) + 2 * (2560 + 1024))
    assert found["predicted"]["seconds"] == pytest.approx(2 * found["bytes"] / 1e9)
    assert "LoRA adapters alone" in show(recipe=str(recipe))
