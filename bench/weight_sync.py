"""Seconds of a weight sync by each transport, from trainers of three layouts to a real server on the same machine.

    python -m bench.weight_sync [--megabytes 1000] [--repeats 3]

A random model is made on the spot. In the same run: this machine's memcpy of as many bytes, on one thread, counted once; and a
bare gloo broadcast of the same bytes from one process to another, in buckets of the same size. The targets: shared memory at
least at 40% of the memcpy's rate, broadcast at least at 70% of the bare one's. Before each transport the server gets other
weights; afterwards its log-probs of a few sequences have to be those, to the bit, that it gave when it had read the model's
files. (SGLang's own checksums of tensors need CUDA.) Beside the targets: what the same bytes take where nothing of megarl is
between (support/bare_load.py), a process that has them ready, and one that receives and loads them by SGLang's own load, one
after the other as its server does. Exit code 0 only where answers are equal. Whether targets are met is in the table, with
the machine's load.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.support.bare_load import bare_loads
from bench.support.measure import in_fresh_process, in_fresh_ranks, write
from megarl.core.layout import Layout
from megarl.core.platform import get_platform, held_bytes, peak_bytes, reset_peak_bytes
from megarl.core.ports import free_port
from megarl.models.parts import first_copy
from megarl.recipe.schema import Sync
from megarl.serving.client import ServerClient, ServerEndpoint
from megarl.serving.server import ProcessPlace, ServerProcess, ServerSpec
from megarl.sync.ring import bucket_limit
from megarl.sync.sending import Sending, TransportName

MB = 10**6
HIDDEN, VOCABULARY = 1024, 8192
LAYER_BYTES = 4 * HIDDEN * (HIDDEN * 3 + 3 * 4 * HIDDEN)
LAYOUTS = {
    "tp1": Layout(),
    "tp2": Layout(tp=2, sequence_parallel=True, world_size=2),
    "pp2": Layout(pp=2, world_size=2),
}
TRANSPORTS: tuple[TransportName, ...] = ("shared_memory", "broadcast")
BUCKET_BYTES = Sync().bucket_mb * 2**20  # as recipes have it by themselves
BARE_BUCKET_BYTES = 64 * 2**20
DEADLINE_S = 300.0
ROLE = "actor"
PROBE = [[7 * i % 8000 + 1 for i in range(start, start + 60)] for start in (0, 100, 1000)]
LEAST_OF_MEMCPY, LEAST_OF_BARE = 0.4, 0.7


def model_at(folder: Path, num_bytes: int, seed: int) -> Path:
    """A random qwen3 in float32 of about so many bytes."""
    from tests.support.tiny import write_tiny_model

    return write_tiny_model(
        folder,
        "qwen3",
        seed=seed,
        num_hidden_layers=2 * max(1, round((num_bytes - 4 * VOCABULARY * HIDDEN) / LAYER_BYTES / 2)),
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        head_dim=64,
        num_attention_heads=HIDDEN // 64,
        num_key_value_heads=HIDDEN // 128,
        vocab_size=VOCABULARY,
    )


def memcpy_s(num_bytes: int, repeats: int) -> float:
    """Median seconds of copying so many bytes once, on one thread, memory that is at hand."""
    import torch

    source, target = torch.ones(num_bytes // 4), torch.zeros(num_bytes // 4)
    return statistics.median(_seconds(repeats, lambda: target.copy_(source)))


def bare_broadcast_s(rank: int, port: int, num_bytes: int, repeats: int) -> float:
    """Median seconds of a gloo broadcast of so many bytes to one other process, in buckets of BARE_BUCKET_BYTES."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    flat = torch.ones(BARE_BUCKET_BYTES, dtype=torch.uint8)

    def once() -> None:
        for start in range(0, num_bytes, BARE_BUCKET_BYTES):
            dist.broadcast(flat[: min(BARE_BUCKET_BYTES, num_bytes - start)], src=0)
        dist.barrier()

    taken = _seconds(repeats, once)
    dist.destroy_process_group()
    return statistics.median(taken)


def _seconds(repeats: int, work: Any) -> list[float]:
    taken = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return taken[1:]


def syncs(
    rank: int, layout: Layout, port: int, models: Sequence[Path], server: ServerEndpoint, registry: Path, repeats: int
) -> dict[str, list[dict[str, Any]]]:
    """One rank's part: each transport in turn sends the other model once, and the first so often; rank 0's reports."""
    from megarl.sync.transport import make_transport
    from megarl.training.rank import Rank
    from megarl.training.spec import RoleSpec

    platform = get_platform()
    ranks = Rank(rank, layout.world_size, platform.name, seed=1)
    ranks.rendezvous("127.0.0.1", port, DEADLINE_S)
    for name, model in zip((ROLE, "other"), models, strict=True):
        ranks.build(name, RoleSpec(model, "float32", layout=layout))
    told: dict[str, list[dict[str, Any]]] = {}
    for name in TRANSPORTS:
        nodes, registries = (0,) * layout.world_size, (registry,) * layout.world_size
        sending = Sending(name, first_copy(layout), nodes, registries, BUCKET_BYTES, DEADLINE_S)
        transport = make_transport(
            sending,
            rank=rank,
            host="127.0.0.1",
            platform=platform,
            control=ranks.everyone(),
        )
        reports, extra = [], 0
        for role in ("other", *[ROLE] * repeats):
            before = held_bytes(platform)
            reset_peak_bytes(platform)
            reports.append(transport.send(ranks.engine(role), 1, [server]))
            extra = max(extra, peak_bytes(platform) - before)
        transport.close()
        told[name] = [asdict(report) for report in reports[1:] if report is not None] or [{}]
        told[name][-1]["extra_bytes"] = extra
        if rank == 0:
            told[name][-1]["answers"] = answers(server)
    ranks.close()
    return told


def answers(endpoint: ServerEndpoint) -> list[list[float]]:
    """The server's log-probs of a few sequences, natural."""

    async def ask() -> list[list[float]]:
        async with ServerClient(endpoint) as client:
            await client.flush_cache(10.0)
            return [(await client.prompt_scores(row, DEADLINE_S)).logprobs.tolist() for row in PROBE]

    return asyncio.run(ask())


def measured(folder: Path, num_bytes: int, repeats: int) -> dict[str, Any]:
    """All figures; needs a server's start, and then about a minute a layout."""
    models = [model_at(folder / f"model {seed}", num_bytes, seed) for seed in (0, 1)]
    size = sum(path.stat().st_size for path in models[0].glob("*.safetensors"))
    spec = ServerSpec(models[0], "float32", kv_tokens=1024, context_length=512)
    server = ServerProcess("server", spec, get_platform(), ProcessPlace(folder / "logs", "key-of-the-bench"))
    server.start()
    try:
        server.wait_ready(DEADLINE_S)
        first = answers(server.endpoint)
        result: dict[str, Any] = {
            "bytes": size,
            "memcpy_s": in_fresh_process(1, memcpy_s, size, repeats),
            "bare_broadcast_s": max(in_fresh_ranks(2, bare_broadcast_s, free_port(), size, repeats)),
        }
        buckets = BARE_BUCKET_BYTES, bucket_limit(BUCKET_BYTES)
        alone = in_fresh_ranks(2, bare_loads, free_port(), models[0], *buckets, repeats)
        result["server_alone"] = {name: max(getattr(each, name) for each in alone) for name in asdict(alone[0])}
        rows = []
        for layout_name, layout in LAYOUTS.items():
            told = in_fresh_ranks(
                layout.world_size, syncs, layout, free_port(), models, server.endpoint, folder / "registry", repeats
            )
            for name in TRANSPORTS:
                extra = max(each[name][-1]["extra_bytes"] for each in told)
                rows.append(row(layout_name, name, told[0][name], extra, first, result))
    finally:
        server.stop()
    return {**result, "rows": rows, "met": all(each["met"] for each in rows)}


def row(
    layout: str,
    transport: str,
    reports: Sequence[dict[str, Any]],
    extra_bytes: int,
    expected: list[list[float]],
    bounds: dict[str, Any],
) -> dict[str, Any]:
    """The median sync of one transport. of: its rate over that of the bound that it is held against.

    extra_bytes: most that a rank held beside what it held before, in the worst of all syncs; the first one takes the memory.
    """
    middle = sorted(reports, key=lambda report: report["seconds"])[len(reports) // 2]
    shared = transport == "shared_memory"
    share = bounds["memcpy_s" if shared else "bare_broadcast_s"] / middle["seconds"]
    alone = bounds["server_alone"]["shared_s" if shared else "serial_s"]
    return {
        "layout": layout,
        "transport": transport,
        "seconds": middle["seconds"],
        "pieces": middle["pieces"],
        "extra_bytes": extra_bytes,
        "of": share,
        "of_server_alone": alone / middle["seconds"],
        "met": share >= (LEAST_OF_MEMCPY if shared else LEAST_OF_BARE),
        "equal": reports[-1]["answers"] == expected and not any(report["failed"] for report in reports),
    }


def table(result: dict[str, Any]) -> Iterator[Table]:
    """What was seen."""
    size = result["bytes"]
    memcpy, bare = size / result["memcpy_s"] / 1e9, size / result["bare_broadcast_s"] / 1e9
    shown = Table(title=f"{size / MB:,.0f} MB; memcpy {memcpy:.2f} GB/s, bare gloo broadcast {bare:.2f} GB/s")
    columns = (
        "s",
        "GB/s",
        "of its bound",
        "target met",
        "of server alone",
        "answers equal",
        "extra MB a rank",
        "s by piece",
    )
    for name in ("trainer", "transport", *columns):
        shown.add_column(name)
    for each in result["rows"]:
        pieces = ", ".join(f"{name} {seconds:.2f}" for name, seconds in each["pieces"].items())
        figures = (f"{each['seconds']:.2f}", f"{size / each['seconds'] / 1e9:.2f}", f"{each['of']:.0%}")
        alone = f"{each['of_server_alone']:.0%}"
        yes = ("yes" if each["met"] else "no", alone, "yes" if each["equal"] else "NO")
        extra = f"{each['extra_bytes'] / MB:,.0f}"
        shown.add_row(each["layout"], each["transport"], *figures, *yes, extra, pieces)
    yield shown
    alone_table = Table(title="The server alone: nothing of megarl between, SGLang's own load")
    for name in ("way", "s", "of its bound"):
        alone_table.add_column(name)
    for key, way, whole_s in (
        ("shared_s", "written into shared memory while it loads", result["memcpy_s"]),
        ("in_place_s", "received into memory that is at hand, and not loaded", result["bare_broadcast_s"]),
        ("fresh_s", "received into fresh tensors, and not loaded", result["bare_broadcast_s"]),
        ("serial_s", "received, then loaded", result["bare_broadcast_s"]),
        ("ahead_s", "received while the bucket before is loaded (its server cannot)", result["bare_broadcast_s"]),
    ):
        seconds = result["server_alone"][key]
        alone_table.add_row(way, f"{seconds:.2f}", f"{whole_s / seconds:.0%}")
    yield alone_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        result = measured(Path(temporary), options.megabytes * MB, options.repeats)
    Console(width=140).print(*table(result))
    write("weight_sync", result, None)
    sys.exit(0 if all(each["equal"] for each in result["rows"]) else 1)


if __name__ == "__main__":
    main()
