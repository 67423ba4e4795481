"""The cluster that a run is on, where no cluster file says: devices like this machine's, by the table. Without torch."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import psutil

from megarl.core.platform import get_platform, num_local_devices
from megarl.core.ray_env import nodes_of_ray, ray_to_join
from megarl.placement.cluster import Cluster, make_cluster, one_kind, read_cluster
from megarl.placement.devices import DEVICES, GIB
from megarl.recipe.schema import Recipe

# What the driver of NVIDIA's devices says of each of them; longer names first, for some are parts of others.
_DRIVER_FILES = Path("/proc/driver/nvidia/gpus")
_NAMES = {
    "GB200": "GB200",
    "A100-SXM4-40GB": "A100-40",
    "A100-PCIE-40GB": "A100-40",
    "A100": "A100-80",
    "A800": "A800",
    "H100 NVL": "H100-NVL",
    "H100 PCIe": "H100-PCIe",
    "H100": "H100",
    "H200 NVL": "H200-NVL",
    "H200": "H200",
    "H800": "H800",
    "H20-3e": "H20-141",
    "H20": "H20",
    "B200": "B200",
    "B300": "B300",
    "L40S": "L40S",
    "L4": "L4",
    "A10": "A10",
    "RTX A6000": "RTX-A6000",
    "RTX 6000 Ada Generation": "RTX-6000-Ada",
    "RTX 4090": "RTX-4090",
    "RTX 5090": "RTX-5090",
}
# What follows the name of a smaller one.
_SMALLER = r"(?! Laptop| D\b)"
HOST = "cpu"


def run_cluster(recipe: Recipe) -> Cluster | None:
    """The cluster of cluster.file; else nodes like this machine. None for devices that the table lacks, or nodes nobody counted.

    Raises UserError for a file that cannot be used.
    """
    platform, wanted, file = get_platform(recipe.cluster.platform), recipe.cluster.devices, recipe.cluster.file
    here = num_local_devices(platform)
    if here is None:
        return host_cluster(wanted, file)
    if file is not None:
        return one_kind(read_cluster(file))
    name, nodes = device_name(), _num_nodes(recipe.cluster.spares)
    # Servers may have devices of their own: the ranks' number does not tell how many there are. A search takes what there is.
    if name is None or nodes * here < (1 if recipe.placement.name is not None else wanted):
        return None
    return replace(make_cluster(name, nodes, here), host_bytes=float(psutil.virtual_memory().total))


def _num_nodes(spares: int) -> int:
    """Nodes that a run may take: this machine, or those of the Ray that it joins; 0 where nobody says how many these are."""
    if ray_to_join() is None:
        return 1
    return max(0, (nodes_of_ray() or 0) - spares)


def host_cluster(devices: int, file: Path | None = None) -> Cluster:
    """This machine, with so many processes that stand for devices: they share its cores and its memory.

    file: where its figures are; default: the table's.
    """
    cluster = make_cluster(HOST, 1) if file is None else one_kind(read_cluster(file))
    memory = psutil.virtual_memory().total / devices
    if file is None:
        cores = float(len(os.sched_getaffinity(0)))
        cluster = replace(cluster, rates=replace(cluster.rates, at_once=cores, servers_at_once=cores))
    device = replace(cluster.device, memory_bytes=memory)
    return replace(cluster, nodes=1, devices_per_node=devices, device=device)


def device_name() -> str | None:
    """The table's name of this machine's NVIDIA devices; None where there are none, or others."""
    for file in sorted(_DRIVER_FILES.glob("*/information")):
        model = next((line for line in file.read_text().splitlines() if line.startswith("Model:")), "")
        # Whole words: a GH200 is no H200.
        found = [name for part, name in _NAMES.items() if re.search(rf"(?<!\w){part}(?!\w){_SMALLER}", model)]
        return found[0] if found and found[0] in DEVICES and not _of_another_size(found[0], model) else None
    return None


def _of_another_size(name: str, model: str) -> bool:
    """Whether the driver's name says another memory than the table has: an A100 has 40 GB, or 80."""
    said = re.search(r"(\d+) ?GB\b", model)
    return said is not None and not 0.9 < int(said[1]) * GIB / DEVICES[name].memory_bytes < 1.1
