"""The cluster that a run is on, where no cluster file says: this machine's devices, by the table. Without torch."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import psutil

from megarl.core.platform import get_platform, num_local_devices
from megarl.placement.cluster import Cluster, make_cluster, read_cluster
from megarl.placement.devices import DEVICES
from megarl.recipe.schema import Recipe

# What the driver of NVIDIA's devices says of each of them; longer names first, for some begin alike.
_DRIVER_FILES = Path("/proc/driver/nvidia/gpus")
_NAMES = {"A100": "A100-80", "H100": "H100", "H200": "H200", "B200": "B200", "L40S": "L40S"}
HOST = "cpu"


def run_cluster(recipe: Recipe, file: Path | None = None) -> Cluster | None:
    """The cluster of a file, or what this machine has of the recipe's devices; None for devices that the table lacks.

    Raises UserError for a file that cannot be used.
    """
    if file is not None:
        return read_cluster(file)
    platform, devices = get_platform(recipe.cluster.platform), recipe.cluster.devices
    here = num_local_devices(platform)
    if here is None:
        return host_cluster(devices)
    name = device_name()
    if name is None or here == 0:
        return None
    per_node = min(here, devices)
    return make_cluster(name, -(-devices // per_node), per_node)


def host_cluster(devices: int) -> Cluster:
    """This machine, with processes that stand for devices: they share its cores and its memory."""
    cluster = make_cluster(HOST, 1, devices)
    memory = psutil.virtual_memory().total / devices
    cores = float(len(os.sched_getaffinity(0)))
    return replace(
        cluster,
        device=replace(cluster.device, memory_bytes=memory),
        rates=replace(cluster.rates, at_once=cores, servers_at_once=cores),
    )


def device_name() -> str | None:
    """The table's name of this machine's NVIDIA devices; None where there are none, or others."""
    for file in sorted(_DRIVER_FILES.glob("*/information")):
        model = next((line for line in file.read_text().splitlines() if line.startswith("Model:")), "")
        found = [name for part, name in _NAMES.items() if part in model]
        return found[0] if found and found[0] in DEVICES else None
    return None
