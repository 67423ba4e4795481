"""Runs over several nodes: who sits where, what is refused before the start, and cables that are cut."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.core.janitor import processes_of
from tests.end_to_end.harness import POLL_S, RECIPE, Driver, is_rank, is_server
from tests.support.netns_cluster import Nodes, nodes

pytestmark = pytest.mark.slow

DEVICES = {"megarl_cpu_device": 1.0}
CUT_S = 60.0  # within which a cut network has to be named
DRIVER = "tests.end_to_end.nodes_driver"
# A teacher in a pool of its own, whose log-probs are the advantages of a function of somebody's; rollout's are the old ones.
TAUGHT = [
    "placement.pools={policy: {devices: 1, roles: [actor]}, others: {devices: 1, roles: [teacher]}}",
    "algorithm.advantage=tests.end_to_end.rewards:taught",
    "algorithm.settings={reward_share: 0.0}",
    "algorithm.kl_coef=0",
    "algorithm.old_logprobs=rollout",
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    """Three nodes of one device each, and a fourth that has not started Ray yet."""
    with nodes(4) as made:
        for index in range(3):
            made.start_ray(index, DEVICES, num_gpus=2)
        made.wait_for_ray(3)
        yield made


def drive(cluster: Nodes, command: str, folder: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", DRIVER, command, str(folder)]
    return cluster[0].popen(argv, MEGARL_RAY_ADDRESS=cluster.ray_address)


def finish(process: subprocess.Popen[str], timeout_s: float = 90.0) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


def on_node(cluster: Nodes, index: int, pids: list[int]) -> list[int]:
    """Those of these processes that run on a node."""

    def network(pid: int) -> Path | None:
        try:
            return Path(f"/proc/{pid}/ns/net").readlink()
        except OSError:
            return None  # it ended meanwhile

    return [pid for pid in pids if network(pid) == network(cluster[index].pid)]


def test_ranks_are_in_the_order_of_nodes_servers_beside_them_and_a_folder_of_one_alone_is_refused(
    cluster: Nodes, tmp_path: Path
) -> None:
    code, out, err = finish(drive(cluster, "survey", tmp_path))
    assert code == 0, err
    seen = json.loads(out)
    # /tmp/ray is each node's own.
    refused, why = seen["alone"]
    assert refused == 2 and f"/tmp/ray/alone is not on node2 ({cluster[1].address})" in why
    assert seen["nodes"] == [f"{node.name} ({node.address})" for node in cluster.nodes[:3]]
    ranks, names = seen["ranks"], ["node1", "node2", "node3"]
    assert len(set(ranks)) == 2 and ranks == sorted(ranks)
    [free] = set(names) - set(ranks)
    assert seen["servers"] == [free, free]
    assert seen["facts"]["host"] == ranks[1]
    assert seen["facts"]["address"] == cluster[names.index(ranks[1])].address
    first, second = sorted({name for name, _ in seen["gpus"]["ranks"]})
    assert seen["gpus"]["ranks"] == [[first, ["0"]], [first, ["1"]], [second, ["0"]], [second, ["1"]]]
    [third] = set(names) - {first, second}
    assert seen["gpus"]["own"] == [[third, ["0", "1"]]] and not seen["gpus"]["own is shared"]
    assert "needs 1000 devices (megarl_cpu_device), and 3 are there" in seen["missing"]
    assert f"node3 ({cluster[2].address}): 1" in seen["missing"]
    assert "in wait_for_ever" in seen["stacks"], "the stacks of a process of another node"
    assert seen["environment"] == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}


def test_a_link_cut_in_the_middle_or_before_the_start_is_named(cluster: Nodes, tmp_path: Path) -> None:
    """Between two nodes that Ray's head goes on reaching: nobody but megarl would ever say so."""
    (tmp_path / "stalled").mkdir()
    stalled = drive(cluster, "stall", tmp_path / "stalled")
    assert stalled.stdout is not None
    assert stalled.stdout.readline() == "waiting\n"
    cluster.cut_between(1, 2)
    began = time.monotonic()
    starting = drive(cluster, "look", tmp_path)
    link = f"node2 ({cluster[1].address}) cannot reach node3 ({cluster[2].address}) on interface eth0: no answer"
    for name, process in (("stalled", stalled), ("starting", starting)):
        code, _, err = finish(process)
        print(f"{name}: named and ended after {time.monotonic() - began:.0f} s")
        assert time.monotonic() - began < CUT_S
        assert code == 1 and link in err
    cluster.mend_between(1, 2)


def test_a_spare_takes_the_place_of_a_node_and_without_one_the_node_is_named_and_nothing_left(
    cluster: Nodes, inputs: Path, tmp_path: Path
) -> None:
    recipe = inputs / "several.yaml"
    recipe.write_text(RECIPE.format(folder=inputs))
    overrides = ["run.name=several", "cluster.devices=2", "cluster.spares=1", "train.steps=1000", "data.eval=null"]
    overrides += [*TAUGHT, f"teacher.path={inputs}/model"]
    process = cluster[0].popen(
        [sys.executable, "-m", "megarl", "train", str(recipe), *overrides], MEGARL_RAY_ADDRESS=cluster.ray_address
    )
    driver = Driver(process, inputs / "runs" / "several", set(), tmp_path)
    driver.wait_for_step(2)
    everyone = processes_of(driver.run_id())
    spare = on_node(cluster, 2, everyone)
    assert [len(on_node(cluster, index, driver.pids(is_rank))) for index in range(3)] == [1, 1, 0]
    assert driver.pids(is_server) and not set(spare).intersection(driver.pids(is_server))
    rows = driver.metrics()[1:]
    assert rows[0]["actor/pg_loss"] == pytest.approx(0, abs=1e-4), "the teacher is the policy itself"
    assert all("perf/teacher_s" in row and "perf/logprobs_s" not in row for row in rows)
    assert {path.name for path in (driver.folder / "logs").glob("*rank_*.log")} == {
        "policy_rank_0.log",
        "others_rank_0.log",
    }
    before = rows[-1]["step"]
    cluster[1].cut()
    began = time.monotonic()
    driver.wait_for(lambda row: row["step"] > before and row["perf/recoveries"] == 1)
    print(f"on the spare after {time.monotonic() - began:.0f} s")
    lost = 2
    cluster[lost].cut()
    began = time.monotonic()
    code, _, err = driver.finish(90)
    print(f"named and ended after {time.monotonic() - began:.0f} s")
    assert time.monotonic() - began < CUT_S
    assert code == 1
    assert f"{cluster[lost].name} ({cluster[lost].address})" in err
    assert "Traceback" not in err.partition("--- end of")[0]
    assert "/several/checkpoints/step_" in err and err.splitlines()[-1].endswith(" --resume")
    end = time.monotonic() + 20
    while left := on_node(cluster, 0, processes_of(driver.run_id())):
        assert time.monotonic() < end, left
        select.select([], [], [], POLL_S)
    assert cluster[0].run(["ls", "/dev/shm"]).stdout.split() == []


def test_another_version_on_one_node_is_refused(cluster: Nodes, tmp_path: Path) -> None:
    package = tmp_path / "other" / "sglang-0.0.1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.0.1\n")
    before = sum(not node.is_cut for node in cluster.nodes[:3])
    cluster.start_ray(3, DEVICES, PYTHONPATH=str(tmp_path / "other"))
    cluster.wait_for_ray(before + 1)
    code, _, err = finish(drive(cluster, "look", tmp_path))
    assert code == 2
    assert f"sglang: 0.0.1 on node4 ({cluster[3].address})" in err
