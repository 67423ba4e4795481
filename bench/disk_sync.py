"""Bytes and seconds of weight versions over the disk: whole, then what optimizer steps changed, to a real server.

    python -m bench.disk_sync [--megabytes 300] [--dtypes float32 bfloat16]

A random model is made on the spot and trained by AdamW, on random tokens with float32 master weights, at several learning
rates; what is written is float32 or bfloat16. Each version is written, put together on the node and loaded by a server. The
server's log-probs of a few sequences have to be others than before, and in the end, to the bit, those that it gives once it has
read the same version whole. Exit code 0 only where they are.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.support.measure import in_fresh_process, write
from bench.weight_sync import BUCKET_BYTES, DEADLINE_S, MB, answers, model_at
from megarl.core.platform import get_platform
from megarl.models.hf_dtypes import ModelDtype
from megarl.serving.client import ServerClient, ServerEndpoint
from megarl.serving.server import ProcessPlace, ServerProcess, ServerSpec

NUM_BYTES: dict[ModelDtype, int] = {"float32": 4, "bfloat16": 2}  # of a number
RATES = (1e-6, 1e-5, 1e-4)
WARM_STEPS = 3  # before the first version: Adam's first step moves every weight by the whole rate
STEPS = 2  # versions of differences a rate
BATCH = 2, 64
VOCABULARY = 8192


def buckets_of(model: Any, dtype: str) -> list[list[tuple[str, Any]]]:
    """All weights under HF names, in buckets as a plan cuts them."""
    import torch

    buckets: list[list[tuple[str, Any]]] = [[]]
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        cast = tensor.to(getattr(torch, dtype)).clone()
        if buckets[-1] and sum(each.nbytes for _, each in buckets[-1]) + cast.nbytes > BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append((name, cast))
    return buckets


def trained(folder: Path, rate: float, dtype: str) -> Iterator[list[list[tuple[str, Any]]]]:
    """The weights before a step and after each of STEPS."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for step in range(WARM_STEPS + STEPS):
        tokens = torch.randint(VOCABULARY, BATCH, generator=generator)
        model(tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step >= WARM_STEPS - 1:
            yield buckets_of(model, dtype)


def versions(model: Path, folder: Path, dtype: str, server: ServerEndpoint) -> list[dict[str, Any]]:
    """A row a version."""
    from megarl.sync.disk import DiskSender
    from megarl.sync.mirror import Mirror
    from megarl.sync.store import Store
    from tests.sync.given import Given

    rows = []
    for rate in RATES:
        store = Store(folder / f"versions-{rate:g}", "model")
        before = answers(server)
        sender, mirror = DiskSender(rank=0, store=store, whole_bytes=0), Mirror(folder / f"node-{rate:g}", store)
        for version, buckets in enumerate(trained(model, rate, dtype), start=1):
            names = [f"model-{number:05d}.safetensors" for number in range(len(buckets))]
            report = sender.write(Given(buckets), names, version)
            assert report is not None
            began = time.monotonic()
            files = mirror.bring(version, began + DEADLINE_S)
            together_s = time.monotonic() - began
            load_s = loaded(server, files, version)
            got = answers(server)
            moved, before = got != before, got
            manifest = store.manifest(version)
            rows.append(
                {
                    "dtype": dtype,
                    "rate": rate,
                    "whole": manifest.base is None,
                    "bytes": report.num_bytes,
                    "of": report.num_bytes / manifest.whole_bytes,
                    "write_s": report.seconds,
                    "pieces": report.pieces,
                    "together_s": together_s,
                    "load_s": load_s,
                    "moved": moved,
                }
            )
        # The last one again, from a sender and a node that know nothing: it comes whole.
        fresh = Store(folder / f"again-{rate:g}", "model")
        again = DiskSender(rank=0, store=fresh, whole_bytes=0)
        again.write(Given(buckets), names, version)
        loaded(server, Mirror(folder / f"fresh-{rate:g}", fresh).bring(version, time.monotonic() + DEADLINE_S), version)
        rows[-1]["equal"] = got == answers(server)
        again.close()
        sender.close()
    return rows


def loaded(server: ServerEndpoint, files: Path, version: int) -> float:
    """Seconds that the server takes to load them."""

    async def load() -> float:
        async with ServerClient(server) as client:
            began = time.monotonic()
            await client.update_from_disk(files, version, DEADLINE_S)
            return time.monotonic() - began

    return asyncio.run(load())


def measured(folder: Path, num_bytes: int, dtypes: Sequence[ModelDtype]) -> list[dict[str, Any]]:
    """All rows; a server's start for each dtype, and then a step and a few seconds a version."""
    rows = []
    for dtype in dtypes:
        model = model_at(folder / f"model {dtype}", num_bytes * 4 // NUM_BYTES[dtype], 0)
        spec = ServerSpec(model, dtype, kv_tokens=1024, context_length=512)
        server = ServerProcess("server", spec, get_platform(), ProcessPlace(folder / "logs", "key-of-the-bench"))
        server.start()
        try:
            server.wait_ready(DEADLINE_S)
            rows += in_fresh_process(1, versions, model, folder / dtype, dtype, server.endpoint)
        finally:
            server.stop()
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """What was seen."""
    shown = Table(title="Weight versions over the disk")
    for name in (
        "dtype",
        "rate",
        "version",
        "MB",
        "of whole",
        "write, s",
        "by piece",
        "put together, s",
        "load, s",
        "equal",
    ):
        shown.add_column(name)
    for row in rows:
        pieces = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row["pieces"].items())
        figures = f"{row['bytes'] / MB:.1f}", f"{row['of']:.1%}", f"{row['write_s']:.2f}", pieces
        times = f"{row['together_s']:.2f}", f"{row['load_s']:.2f}"
        equal = {True: "yes", False: "NO", None: ""}[row.get("equal")]
        kind = "whole" if row["whole"] else "changes"
        shown.add_row(row["dtype"], f"{row['rate']:g}", kind, *figures, *times, equal)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--dtypes", nargs="+", choices=[*NUM_BYTES], default=[*NUM_BYTES])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        rows = measured(Path(temporary), options.megabytes * MB, options.dtypes)
    Console(width=170).print(table(rows))
    write("disk_sync", {"megabytes": options.megabytes, "rows": rows}, None)
    sys.exit(0 if all(row["moved"] and row.get("equal", True) for row in rows) else 1)


if __name__ == "__main__":
    main()
