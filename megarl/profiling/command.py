"""`megarl profile`: measures this machine in some minutes, and writes the cluster file that `megarl plan` reads."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import psutil
from rich.console import Console

from megarl.core.disk import check_writable
from megarl.core.errors import UserError
from megarl.core.layout import Layout
from megarl.core.platform import Platform, get_platform, num_local_devices
from megarl.core.ports import kept_port
from megarl.core.scratch import Scratch
from megarl.models.hf_config import load_model_config
from megarl.placement.cluster import Cluster, make_cluster
from megarl.placement.devices import DEVICES, GIB
from megarl.placement.local import HOST, device_name
from megarl.placement.rates import RATES
from megarl.profiling.fit import Findings, Fitted, error_words, fit_cluster
from megarl.profiling.job import Case, Dtype, Job, Measured
from megarl.profiling.ranks import measure_ranks
from megarl.profiling.reference_model import Size, write_reference_model
from megarl.profiling.servers import Generated, serving
from megarl.recipe.source import dump_yaml

# The reference models, a narrow and a wide one, and the tokens of a sequence: devices of their own are faster.
HOST_MODELS, HOST_TOKENS = (Size(4, 128, 512), Size(4, 256, 1024)), 32
DEVICE_MODELS, DEVICE_TOKENS = (Size(8, 1024, 8192), Size(8, 4096, 32768)), 512
# Sequences of a case, few and many.
FEW, MANY = 8, 64
# Where the ranks are processes, as many are tried.
HOST_RANKS = 4
LAYOUTS: tuple[dict[str, int], ...] = (
    {},
    {"tp": 2},
    {"pp": 2},
    {"cp": 2},
    {"tp": 2, "pp": 2},
)


def run_profile(out: Path, servers: int, deadline_s: float, scratch: Scratch) -> None:
    """Measure and write. servers: how many are started; 0 leaves generation to the table's figures.

    scratch: where what is temporary goes, and who removes it where this process is killed. Raises UserError.
    """
    if out.exists():
        raise UserError(f"{out} is there already. Choose another file by --out, or delete it.")
    check_writable(out, "--out")
    platform = get_platform()
    name = device_name() if platform.has_device_memory else HOST
    if name is None:
        raise UserError(
            f"This machine's devices are not in the table ({', '.join(DEVICES)}): add a row to megarl/placement/devices.py."
        )
    console = Console(markup=False)
    devices = num_local_devices(platform)
    with tempfile.TemporaryDirectory(prefix="megarl-profile-") as folder:
        # One device is left to the rank that sends the servers its weights, where there are more.
        most = servers if devices is None else max(1, devices - 1)
        found = measure(platform, devices or HOST_RANKS, min(servers, most), Path(folder), deadline_s, console, scratch)
    fitted = fit_cluster(_table(name, devices or HOST_RANKS, platform), found)
    out.write_text(cluster_file(fitted))
    for line in (*error_words(fitted), f"written to {out}: megarl plan RECIPE --cluster {out}"):
        console.print(line, highlight=False)


def measure(
    platform: Platform,
    devices: int,
    servers: int,
    folder: Path,
    deadline_s: float,
    console: Console,
    scratch: Scratch,
) -> Findings:
    """Everything, on 1, 2, 4... ranks up to the devices. folder: for the models and logs."""
    sizes, tokens = (DEVICE_MODELS, DEVICE_TOKENS) if platform.has_device_memory else (HOST_MODELS, HOST_TOKENS)
    dtype: Dtype = "bfloat16" if platform.has_device_memory else "float32"
    models = tuple(write_reference_model(folder / f"model{index}", size) for index, size in enumerate(sizes))
    counts = [1 << power for power in range(devices.bit_length())]
    generated: list[Generated] = []
    measured: list[Measured] = []

    def measure(count: int, **more: object) -> Measured:
        with kept_port("127.0.0.1") as meet:
            port = int(meet.getsockname()[1])
            given = Job(platform.name, dtype, models, cases(count, tokens), count, port, deadline_s)
            return measure_ranks(replace(given, **more), folder / "ranks.log")  # type: ignore[arg-type]

    if servers:
        console.print(f"{servers} servers of a small model", highlight=False)
        with serving(models[0], dtype, platform, servers, folder, deadline_s, scratch) as pool:
            generated += pool.measure(sizes[0].vocab)
            console.print("1 rank, and its weights to the servers", highlight=False)
            measured.append(measure(1, servers=pool.endpoints))
    for count in counts[len(measured) :]:
        console.print(f"{count} rank{'s' if count > 1 else ''}", highlight=False)
        measured.append(measure(count))
    configs = tuple(load_model_config(model) for model in models)
    return Findings(dtype, configs, tuple(measured), tuple(generated))


def cases(count: int, tokens: int) -> tuple[Case, ...]:
    """What so many ranks run: every layout that they can have, two models, small and large passes, few and many of them."""
    found = []
    for axes in LAYOUTS:
        size = math.prod(axes.values())
        if count % size or (axes and size < count // 2):
            continue
        layout = Layout(**axes, sequence_parallel="tp" in axes, world_size=count)
        # Half a sequence more: so many fill a micro-batch exactly.
        whole, part = tokens * MANY + tokens // 2, tokens * MANY // 4 + tokens // 2
        micro = part // layout.dp if layout.pp > 1 else whole
        found += [Case(model, layout, MANY, tokens, max(micro, tokens)) for model in (0, 1)]
        if size == count:
            found.append(Case(0, layout, FEW * layout.pp, tokens, FEW * tokens + tokens // 2))
    return tuple(found)


def _table(name: str, devices: int, platform: Platform) -> Cluster:
    cluster = make_cluster(name, 1, devices)
    if platform.has_device_memory:
        return cluster
    memory = psutil.virtual_memory().total / devices
    return replace(cluster, device=replace(cluster.device, memory_bytes=memory))


def cluster_file(fitted: Fitted) -> str:
    """The text of a cluster file: what differs from the table."""
    cluster = fitted.cluster
    table, rates = DEVICES[cluster.device.name], RATES[cluster.device.name]
    measured = {
        field.name: float(f"{getattr(mine, field.name):.4g}")
        for mine, theirs in ((cluster.device, table), (cluster.rates, rates))
        for field in dataclasses.fields(theirs)
        if field.name != "memory_bytes"
        and isinstance(value := getattr(mine, field.name), float)
        and value != getattr(theirs, field.name)
        and math.isfinite(value)
    }
    values = {
        "nodes": cluster.nodes,
        "device": cluster.device.name,
        "devices_per_node": cluster.devices_per_node,
        "memory_gib": round(cluster.device.memory_bytes / GIB, 2),
        "measured": measured,
    }
    header = "# Written by `megarl profile`: figures of this machine, under the names of megarl/placement/devices.py.\n"
    return header + "".join(f"# {line}\n" for line in error_words(fitted)) + dump_yaml(values)
