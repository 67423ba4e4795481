"""What loading costs a rank: memory beside its share of the weights, and bytes a second against `cat`.

A random HF checkpoint of about 2 GB is written, and loaded by one rank and by two tensor-parallel ranks at once, first with
the files out of the page cache, then again with them in it. One command, about a minute and 2 GB of disk:

    python bench/load_weights.py

Peak memory is what the process's highest resident size grew by, from before the model was built until it was loaded; the
share is the bytes of its parameters. Loading for the first time also pays for the memory itself, page by page: the second
load into the same parameters shows the reading alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megarl.core.layout import Layout
from megarl.core.platform import get_platform
from megarl.models.bootstrap import prepare_megatron
from megarl.models.config import ModelConfig
from megarl.models.hf_config import load_model_config
from megarl.rollout.process import free_port

RESULT = Path(__file__).parent / "results" / "load_weights.json"
ALLOWED_BESIDE, ALLOWED_SLOWDOWN = 0.10, 2.0
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 14,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
SHARD_BYTES = 512 * 2**20
CPU = get_platform("cpu")


def write_checkpoint(folder: Path) -> int:
    """Write the random checkpoint; returns the bytes of its files."""
    from megarl.models.hf_save import save_hf
    from megarl.models.rules import expected_tensors

    source = folder.with_name("source")
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "model.safetensors"):
        (source / name).write_text("{}")  # a whole folder, for whom looks no closer
    config = load_model_config(source)

    def buckets() -> Iterator[list[tuple[str, torch.Tensor]]]:
        for name, shape in expected_tensors(config).items():
            yield [(name, torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02))]

    save_hf(buckets(), config, source, folder, SHARD_BYTES)
    return sum(path.stat().st_size for path in weight_files(folder))


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def forget(folder: Path) -> None:
    """Ask the kernel to drop the files from its cache."""
    for path in weight_files(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cat_s(folder: Path) -> float:
    start = time.perf_counter()
    with open(os.devnull, "wb") as nowhere:
        subprocess.run(["cat", *map(str, weight_files(folder))], stdout=nowhere, check=True)
    return time.perf_counter() - start


def resident(field: str) -> int:
    """VmRSS or VmHWM (the highest so far) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def load_as_rank(rank: int, world_size: int, port: int, folder: Path) -> dict[str, Any]:
    """Build and load this rank's part, cold and warm."""
    prepare_megatron(CPU)
    import torch.distributed as dist

    from megarl.models.gpt import build_gpt
    from megarl.models.hf_weights import global_tensors, load_hf_weights
    from megarl.training.parallel import close_ranks, join_ranks, make_groups

    layout = Layout(tp=world_size, world_size=world_size)
    join_ranks(rank, world_size, CPU, "127.0.0.1", port, timeout_s=300)
    groups = make_groups(layout, timeout_s=300, seed=1)
    warm_up(groups, load_model_config(folder))
    before = resident("VmRSS")
    config = load_model_config(folder)
    with groups.active():
        chunks = build_gpt(config, layout, groups.collection, dtype=torch.bfloat16, platform=CPU)
    built = resident("VmRSS")
    seconds = {}
    for kind in ("cold, into fresh memory", "warm", "warm, unchecked"):
        dist.barrier()
        start = time.perf_counter()
        load_hf_weights(chunks, config, folder, layout, rank, check_finite=not kind.endswith("unchecked"))
        dist.barrier()
        seconds[kind] = time.perf_counter() - start
    share = sum(tensor.nbytes for tensor in global_tensors(chunks, layout, rank).values())
    peak = resident("VmHWM") - before
    close_ranks()
    return {"share": share, "peak": peak, "built": built - before, "seconds": seconds}


def warm_up(groups: Any, config: ModelConfig) -> None:
    """Build a small model first: what the libraries load once is no cost of the weights."""
    from megarl.models.gpt import build_gpt

    small = replace(config, num_layers=1, vocab_size=128, ffn_hidden_size=256)
    with groups.active():
        build_gpt(small, groups.layout, groups.collection, dtype=torch.bfloat16, platform=CPU)
    gc.collect()


def run_ranks(world_size: int, folder: Path) -> list[dict[str, Any]]:
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank), str(world_size), port, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world_size)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    assert not any(process.returncode for process in processes), outputs
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def measure() -> dict[str, Any]:
    with TemporaryDirectory(prefix="load_weights") as root:
        folder = Path(root) / "model"
        size = write_checkpoint(folder)
        forget(folder)
        cats = {"cold": cat_s(folder), "warm": min(cat_s(folder) for _ in range(3))}
        results: dict[str, Any] = {"file_bytes": size, "cat_s": cats, "ranks": {}}
        for world_size in (1, 2):
            forget(folder)
            results["ranks"][world_size] = run_ranks(world_size, folder)
    return results


def show(results: dict[str, Any]) -> bool:
    """Print the figures; returns whether they keep to what is asked for."""
    table = Table("ranks", "share, GB", "peak beside the share", *["cold, fresh", "warm", "warm, unchecked"])
    size, cats = results["file_bytes"], results["cat_s"]
    beside = []
    for world_size, ranks in results["ranks"].items():
        beside += [rank["peak"] / rank["share"] - 1 for rank in ranks]
        slowest = {kind: max(rank["seconds"][kind] for rank in ranks) for kind in ranks[0]["seconds"]}
        rates = [f"{size / s / 1e9:.2f} GB/s" for s in slowest.values()]
        worst = max(beside[-len(ranks) :])
        table.add_row(str(world_size), f"{ranks[0]['share'] / 1e9:.3f}", f"{worst:+.1%}", *rates)
    rates = [f"{size / cats[kind] / 1e9:.2f} GB/s" for kind in ("cold", "warm")]
    table.add_row("cat", "", "", *rates, "")
    Console().print(table)
    one = results["ranks"][1][0]["seconds"]
    fast = one["cold, into fresh memory"] < ALLOWED_SLOWDOWN * cats["cold"]
    return fast and max(beside) < ALLOWED_BESIDE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rank", nargs=4, metavar=("RANK", "WORLD", "PORT", "FOLDER"))
    arguments = parser.parse_args()
    if arguments.rank:
        rank, world_size, port, folder = arguments.rank
        print(json.dumps(load_as_rank(int(rank), int(world_size), int(port), Path(folder))))
        return
    results = measure()
    kept = show(results)
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
