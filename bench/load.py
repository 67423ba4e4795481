"""Ranks that load their shares of an HF checkpoint: peak memory against the share, and speed against `cat`.

    python -m bench.load

A random bfloat16 checkpoint of about 2 GB is written to a temporary folder, and removed at the end. For each layout every
rank is a fresh process that builds its part of the model and loads it; its peak is beyond what it held after the imports and
the rendezvous, mapped files included, and is held against its share: the bytes of its parameters. It then loads once more,
into the parameters that are there: what is timed then is reading alone. A turn times the slowest rank's loading and, of the
same files in the same state, two `cat`s: into new memory (a file in /dev/shm), which the first load is held against, and into
/dev/null, which takes no memory: the reading is held against that one. New memory costs more than reading where a hypervisor
backs it only as it is touched. Cold files were dropped from the page cache just before, by posix_fadvise; warm ones are in
it, where cat into /dev/null is no measure: it copies everything onto one buffer of 128 KiB. Ratios are of speeds, the median
over turns. Exit code 0 only where every peak is under the share plus 10%, and every speed at least half of cat's.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from transformers import LlamaConfig

from bench.support.measure import in_fresh_ranks, peak, ratios, summary, write
from megarl.core.layout import Layout
from megarl.core.platform import get_platform
from megarl.core.ports import free_port
from megarl.models.hf_config import load_model_config
from megarl.models.rules import expected_tensors
from tests.support.tiny import write_tokenizer

SHARE_BOUND, SPEED_BOUND = 1.1, 0.5
LAYOUTS = (Layout(), Layout(tp=2, world_size=2), Layout(pp=2, world_size=2))
QUICK_LAYOUTS = LAYOUTS[:1]
MEMORY = Path("/dev/shm")
FILE_BYTES = 512 * 2**20


def write_checkpoint(folder: Path, *, layers: int, hidden: int, vocab: int) -> None:
    """A random Llama in bfloat16, in files of about FILE_BYTES."""
    settings = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    settings.save_pretrained(folder)
    write_tokenizer(folder)
    save_file({}, folder / "model.safetensors")  # the config is only read beside weights
    shapes = expected_tensors(load_model_config(folder))
    (folder / "model.safetensors").unlink()
    pending: dict[str, torch.Tensor] = {}
    for index, (name, shape) in enumerate(shapes.items()):
        pending[name] = torch.randn(shape, dtype=torch.bfloat16)
        if index == len(shapes) - 1 or sum(each.nbytes for each in pending.values()) > FILE_BYTES:
            path = folder / f"part-{index:05d}.safetensors"
            save_file(pending, path)
            with path.open("rb") as file:
                os.fsync(file.fileno())  # only clean pages can be dropped from the cache
            pending.clear()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def drop(paths: Iterable[Path]) -> None:
    """Take the files out of the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cat(paths: list[Path], sink: IO[bytes]) -> float:
    """Seconds of `cat`."""
    with sink:
        began = time.perf_counter()
        subprocess.run(["cat", *map(str, paths)], stdout=sink, check=True)
        return time.perf_counter() - began


def into_nothing(paths: list[Path]) -> float:
    """Seconds of `cat` into /dev/null, which also brings the files into the page cache."""
    return cat(paths, Path(os.devnull).open("wb"))


def into_memory(paths: list[Path]) -> float:
    """Seconds of `cat` into a new file in memory."""
    return cat(paths, tempfile.TemporaryFile(dir=MEMORY))


def load(rank: int, layout: Layout, port: int, folder: Path, state: str) -> dict[str, float]:
    """One rank's part, built and loaded in this process, and then read once more after rank 0's cat into nothing."""
    from megarl.models.bootstrap import prepare_megatron

    platform = get_platform()
    prepare_megatron(platform)
    from megarl.models.gpt import build_gpt
    from megarl.models.hf_weights import load_hf_weights
    from megarl.training.parallel import close_ranks, join_ranks, make_groups

    join_ranks(rank, layout.world_size, platform, "127.0.0.1", port, timeout_s=300)
    groups, config = make_groups(layout, timeout_s=300, seed=1), load_model_config(folder)
    torch.distributed.barrier()
    paths = files(folder)
    seconds: dict[str, float] = {}

    def timed(run: Callable[[], object]) -> float:
        torch.distributed.barrier()
        if state == "cold" and rank == 0:
            drop(paths)
        torch.distributed.barrier()
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    with peak() as held, groups.active():
        chunks = build_gpt(config, layout, groups.collection, dtype=torch.bfloat16, platform=platform)
        read = partial(load_hf_weights, chunks, config, folder, layout, rank)
        seconds["load"] = timed(read)
        # Between two loads, so that both find the machine's memory in the same state.
        seconds["cat into nothing"] = timed(lambda: into_nothing(paths) if rank == 0 else None)
        seconds["read"] = timed(read)
    share = sum(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())
    close_ranks()
    return {"share_bytes": share, "peak_bytes": held.bytes, **seconds}


def measure(layout: Layout, folder: Path, state: str, repeats: int) -> dict[str, Any]:
    """All ranks of a layout, and both cats, in turns."""
    paths = files(folder)
    loads = []
    seconds: dict[str, list[float]] = {"load": [], "cat into memory": [], "read": [], "cat into nothing": []}
    into_nothing(paths)
    for _ in range(repeats):
        if state == "cold":
            drop(paths)
        seconds["cat into memory"].append(into_memory(paths))
        loads.append(in_fresh_ranks(layout.world_size, load, layout, free_port(), folder, state))
        for name in ("load", "cat into nothing", "read"):
            seconds[name].append(max(rank[name] for rank in loads[-1]))
    ranks = [rank for each in loads for rank in each]
    return {
        "layout": str(layout),
        "state": state,
        "checkpoint_bytes": sum(path.stat().st_size for path in paths),
        "peak_over_share": max(rank["peak_bytes"] / rank["share_bytes"] for rank in ranks),
        "share_bytes": max(rank["share_bytes"] for rank in ranks),
        "load_over_cat": summary(ratios(seconds, "cat into memory", "load")),
        "read_over_cat": summary(ratios(seconds, "cat into nothing", "read")),
        "seconds": seconds,
        "ranks": loads,
    }


def is_good(row: dict[str, Any]) -> bool:
    """Whether memory and speed are within bounds."""
    speeds = [row["load_over_cat"]["median"]]
    if row["state"] == "cold":
        speeds.append(row["read_over_cat"]["median"])
    return bool(row["peak_over_share"] < SHARE_BOUND and min(speeds) >= SPEED_BOUND)


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(title=f"Loading a checkpoint of {rows[0]['checkpoint_bytes'] / 1e9:.2f} GB")
    for column in ("layout", "files", "share", "peak / share", *rows[0]["seconds"], "load / memory", "read / nothing"):
        table.add_column(column, justify="right")
    for row in rows:
        speeds = [row["checkpoint_bytes"] / statistics.median(each) / 1e9 for each in row["seconds"].values()]
        both = (row["load_over_cat"], row["read_over_cat"])
        table.add_row(
            *(row["layout"], row["state"], f"{row['share_bytes'] / 1e9:.2f} GB", f"{row['peak_over_share']:.3f}"),
            *(f"{speed:.2f} GB/s" for speed in speeds),
            *(f"{each['median']:.2f} ({each['lowest']:.2f}-{each['highest']:.2f})" for each in both),
        )
    Console(width=160).print(table)


def main(
    *,
    repeats: Annotated[int, typer.Option(min=1, help="Turns; the highest peak counts.")] = 3,
    folder: Annotated[Path | None, typer.Option(help="Where the checkpoint goes; the file system counts.")] = None,
    quick: Annotated[bool, typer.Option(help="A small checkpoint on one rank: does it run at all?")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the result; bench/results where not given.")] = None,
) -> None:
    """Measure memory and speed of loading."""
    with tempfile.TemporaryDirectory(prefix="megarl-load-", dir=folder) as name:
        size = {"layers": 2, "hidden": 256, "vocab": 8192} if quick else {"layers": 16, "hidden": 2048, "vocab": 65536}
        write_checkpoint(Path(name), **size)
        rows = [
            measure(layout, Path(name), state, 1 if quick else repeats)
            for layout in (QUICK_LAYOUTS if quick else LAYOUTS)
            for state in ("warm", "cold")
        ]
    show(rows)
    write("load", {"rows": rows}, out)
    if not (quick or all(is_good(row) for row in rows)):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
