"""Cluster files, their errors, and sizes of pools."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.placement.cluster import make_cluster, read_cluster
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
        ("device: H100\nnodez: 2\n", ["nodez", "nodes"]),
        ("device: H100\nnodes: 0\n", ["nodes", "0"]),
        ("device: H100\nmeasured: {matmull: 0.5}\n", ["matmull", "matmul"]),
        ("device: H100\nmemory_gib: 1\n", ["holds nothing", "memory_gib"]),
        ("device: [\n", ["YAML"]),
    ],
)
def test_wrong_files_are_refused_with_what_to_do(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        read_cluster(written(tmp_path, text))
    assert [part for part in parts if part not in str(caught.value)] == []


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


def test_every_device_says_where_its_figures_are_from() -> None:
    assert {"A100-80", "H100", "H200", "B200", "L40S", "cpu"} <= set(DEVICES)
    assert all(device.source for device in DEVICES.values())
