"""Cluster files, their errors, and sizes of pools."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.placement.cluster import make_cluster, one_kind, read_cluster
from megarl.placement.devices import DEVICES, GIB


def written(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def test_a_file_replaces_figures_of_the_table(tmp_path: Path) -> None:
    text = "nodes: 4\ndevice: H100\nmemory_gib: 94\nbetween_gbit_s: 200\nmeasured: {matmul: 0.5, memory_bytes_s: 3.0e+12}\n"
    cluster = read_cluster(written(tmp_path, text))
    assert cluster.num_devices == 32
    assert cluster.device.memory_bytes == 94 * GIB
    assert cluster.device.between_bytes_s == 25e9
    assert cluster.device.memory_bytes_s == 3e12
    assert cluster.rates.matmul == 0.5
    assert cluster.device.flops == DEVICES["H100"].flops


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("device: H10\n", ["cluster.yaml:1", "H10", "Did you mean H100"]),
        ("nodes: 2\n", ["device"]),
        ("device: H100\nnodez: 2\n", ["nodez", "nodes", "A cluster file has: device"]),
        ("device: H100\nnodes: 0\n", ["nodes", "0"]),
        ("device: H100\nmeasured: {matmull: 0.5}\n", ["matmull", "matmul"]),
        ("device: H100\nmemory_gib: 1\n", ["holds nothing", "memory_gib"]),
        ("device: H100\nmeasured: {matmul: 1.2}\n", ["cluster.yaml:2", "measured.matmul", "1.2", "at most 1"]),
        ("device: H100\nmeasured: {links: 0}\n", ["measured.links", "over 0"]),
        ("device: H100\nmeasured: {fragmentation: 1.5}\n", ["measured.fragmentation", "at most 1"]),
        ("device: H20\nmeasured: {matmul_flops: 2.0e+14}\n", ["cluster.yaml:2", "H20 cannot reach 2e+14", "1.48e+14"]),
        ("nodes: [{device: H100, count: 4}, {device: H2, count: 1}]\n", ["cluster.yaml:1", "H2"]),
        ("nodes: [{device: H100, cuont: 4}]\n", ["nodes.0.cuont", "nodes.0.count"]),
        (
            "device: H100\nmemory_gib: 40\nmeasured: {memory_bytes: 8.0e+10}\n",
            ["cluster.yaml:2", "memory_gib and measured.memory_bytes say the same thing, 4.295e+10 and 8e+10"],
        ),
        ("nodes: [{device: H100, between_gbit_s: 8, measured: {between_bytes_s: 2.0}}]\n", ["1e+09 and 2. Remove"]),
        ("nodes: [{device: H100, measured: {memory: 2}}]\n", ["nodes.0.measured.memory", "at most 1"]),
        ("nodes: [{device: H100}]\ndevice: H20\n", ["device"]),
        (
            "device: cpu\nhost_memory_gib: 64\n",
            ["cluster.yaml:2", "devices of kind cpu are processes", "Remove host_mem"],
        ),
        ("nodes: []\n", ["list of nodes is empty"]),
        ("nodes: [{device: H100}, {device: H100}]\n", ["are alike", "sum as count"]),
        ("nodes: [{device: H100, count: 1}, {device: H100, count: 2}]\n", ["are alike", "sum as count"]),
        ("device: [\n", ["YAML"]),
    ],
)
def test_wrong_files_are_refused_with_what_to_do(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        read_cluster(written(tmp_path, text))
    assert [part for part in parts if part not in str(caught.value)] == []


def test_nodes_of_several_kinds_are_each_their_own(tmp_path: Path) -> None:
    text = (
        "nodes:\n  - {device: H100, count: 4}\n  - {device: H20, count: 8, memory_gib: 90, measured: {matmul: 0.8}}\n"
    )
    cluster = read_cluster(written(tmp_path, text))
    train, serve = cluster.kinds
    assert (train.num_devices, serve.num_devices) == (32, 64)
    assert train == make_cluster("H100", 4)
    assert serve.device.memory_bytes == 90 * GIB and serve.rates.matmul == 0.8 and serve.others == ()
    assert cluster.describe() == "4 nodes of 8 H100 = 32 devices and 8 nodes of 8 H20 = 64 devices"


def test_what_takes_one_kind_refuses_several(tmp_path: Path) -> None:
    several = read_cluster(written(tmp_path, "nodes: [{device: H100}, {device: H20}]\n"))
    with pytest.raises(UserError, match=r"1 node of 8 H100 .* and 1 node of 8 H20"):
        one_kind(several)
    assert one_kind(several.kinds[1]).device.name == "H20"


def test_a_missing_file_says_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no cluster file"):
        read_cluster(tmp_path / "none.yaml")


def test_pool_sizes_match_node_boundaries() -> None:
    assert make_cluster("H100", 3).pool_sizes() == (1, 2, 4, 8, 16, 24)
    assert make_cluster("H100", 1, 6).pool_sizes() == (1, 2, 6)
    assert make_cluster("cpu", 1, 4).pool_sizes() == (1, 2, 4)
    sizes = make_cluster("H100", 34).pool_sizes()
    assert 17 * 8 not in sizes
    assert {16 * 8, 18 * 8, 32 * 8, 34 * 8} <= set(sizes)
    smooth = [count for count in range(17, 331) if 2**8 * 3**5 * 5**3 % count == 0]
    assert make_cluster("H100", 331).pool_sizes()[19:] == (*(8 * count for count in smooth), 331 * 8)


def test_every_device_says_where_its_figures_are_from() -> None:
    assert {"A100-80", "H100", "H200", "B200", "L40S", "cpu"} <= set(DEVICES)
    assert all(device.source for device in DEVICES.values())
