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
from megarl.placement.memory import Role, role_bytes
from megarl.placement.rates import RATES
from megarl.placement.space import one_layout
from megarl.profiling.fit import Findings, Fitted, error_words, fit_cluster
from megarl.profiling.job import Case, Dtype, Job, Measured
from megarl.profiling.ranks import measure_ranks
from megarl.profiling.reference_model import Size, write_reference_model
from megarl.profiling.servers import Generated, served_bytes, serving
from megarl.recipe.source import dump_yaml

# The reference models, a narrow and a wide one, and the tokens of a sequence: devices of their own are faster.
HOST_MODELS, HOST_TOKENS = (Size(4, 128, 512), Size(4, 256, 1024)), 32
# Of devices: the widest pair that fits one. SGLang's attention on many of them, FlashInfer's, takes no heads narrower than 64.
DEVICE_WIDTHS, DEVICE_TOKENS = ((1024, 4096), (1024, 3072), (1024, 2048), (512, 1536), (512, 1024)), 512
DEVICE_LAYERS, DEVICE_VOCAB, DEVICE_HEAD = 8, (8192, 32768), 128
# Sequences of a case, few and many.
FEW, MANY = 8, 64
# Where the ranks are processes, as many are tried.
HOST_RANKS = 4
BYTES = 2  # of a weight on a device
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
        cluster = _table(name, devices or HOST_RANKS, platform)
        found = measure(platform, cluster, min(servers, most), Path(folder), deadline_s, console, scratch)
    fitted = fit_cluster(cluster, found)
    out.write_text(cluster_file(fitted))
    for line in (*error_words(fitted), f"written to {out}: megarl plan RECIPE --cluster {out}"):
        console.print(line, highlight=False)


def measure(
    platform: Platform,
    cluster: Cluster,
    servers: int,
    folder: Path,
    deadline_s: float,
    console: Console,
    scratch: Scratch,
) -> Findings:
    """Everything, on 1, 2, 4... ranks up to the devices. cluster: as the table has it. folder: for the models and logs."""
    sizes, tokens, devices = HOST_MODELS, HOST_TOKENS, cluster.devices_per_node
    if platform.has_device_memory:
        sizes, tokens = device_models(cluster, platform, shares=servers > 0 and devices == 1), DEVICE_TOKENS
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


def device_models(cluster: Cluster, platform: Platform, *, shares: bool) -> tuple[Size, Size]:
    """The widest that one rank can update on a device, by the plan; the narrowest where none fits. shares: with a server."""
    pairs = [
        (
            Size(DEVICE_LAYERS, narrow, DEVICE_VOCAB[0], DEVICE_HEAD),
            Size(DEVICE_LAYERS, wide, DEVICE_VOCAB[1], DEVICE_HEAD),
        )
        for narrow, wide in DEVICE_WIDTHS
    ]
    kernels = replace(cluster.device.kernels, fused=platform.has_transformer_engine)
    role = Role(trained=True, head=True, sequence=DEVICE_TOKENS)
    most = max(case.micro_tokens for case in cases(1, DEVICE_TOKENS))
    for narrow, wide in pairs:
        held = role_bytes(wide.config, one_layout(Layout(), most, "none"), BYTES, role, kernels)
        server = cluster.rates.server_bytes + served_bytes(narrow.config, BYTES) if shares else 0.0
        if float(held.state[0] + held.working[0]) + server <= cluster.usable_bytes:
            return narrow, wide
    return pairs[-1]


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
