"""How samples' tokens go from a collector to the ranks: Ray's object store, beside straw-queue, which was made for it.

    python -m bench.sample_store            # --blocks 32 --mb 16

straw (the package straw-queue, slime's) is installed into a folder of its own for the comparison. It keeps what
it is given in files of a shared file system, durably; here in memory (/dev/shm) and on a disk. With Ray one process writes the
blocks of a step and another reads them; straw's writer reads them itself, which is no slower. Every byte is summed up by who
reads, as some map what others copy; the sums have to be the same. Writes bench/results/sample_store.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from bench.support.measure import write

VERSION = "0.1.6"
SLACK_BYTES = 512 * 2**20  # of Ray's object store, beside the blocks
# A process of its own, which has straw on its path.
STRAW = """
import json, sys, time
import numpy, torch
from straw import SharedFilesystemStore
from straw.tensor import publish_tensors
root, blocks, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
made = [torch.from_numpy(numpy.random.default_rng(n).integers(0, 256, size, numpy.uint8)) for n in range(blocks)]
began = time.perf_counter()
with SharedFilesystemStore(root, "bench", codecs=("tensor.v1",), max_record_bytes=2 * size, max_buffer_bytes=2 * size) as store:
    kept = [publish_tensors(store, {"block": block}, submission_id=f"w{n}")[0] for n, block in enumerate(made)]
    wrote = time.perf_counter()
    sums = [int(ref.load(reader=store).to(torch.int64).sum()) for ref in kept]
    read = time.perf_counter()
assert sums == [int(block.to(torch.int64).sum()) for block in made]
print(json.dumps({"write_s": wrote - began, "read_s": read - wrote, "sum": sum(sums)}))
"""


def blocks_of(count: int, size: int) -> list[NDArray[np.uint8]]:
    """What is sent."""
    return [np.random.default_rng(number).integers(0, 256, size, np.uint8) for number in range(count)]


def by_ray(count: int, size: int) -> dict[str, Any]:
    """One process puts, another gets."""

    def total(refs: list[Any]) -> tuple[float, int]:
        began = time.perf_counter()
        found = sum(int(block.astype(np.int64).sum()) for block in ray.get(refs))
        return time.perf_counter() - began, found

    ray.init(
        num_cpus=2,
        include_dashboard=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
        object_store_memory=count * size + SLACK_BYTES,
    )
    try:
        reader = ray.remote(total)
        ray.get(reader.remote([]))  # its process is up
        made = blocks_of(count, size)
        ray.get([ray.put(block) for block in blocks_of(1, size)])
        began = time.perf_counter()
        refs = [ray.put(block) for block in made]
        wrote_s = time.perf_counter() - began
        read_s, found = ray.get(reader.remote(refs))
    finally:
        ray.shutdown()
    return {"write_s": wrote_s, "read_s": read_s, "sum": found}


@contextmanager
def straw() -> Iterator[str]:
    """A folder with straw in it."""
    with tempfile.TemporaryDirectory(prefix="straw-") as folder:
        words = ["install", "--quiet", "--no-deps", "--target", folder, f"straw-queue=={VERSION}"]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=300)
        yield folder


def by_straw(package: str, root: Path, count: int, size: int) -> dict[str, Any]:
    """straw, with its files in a folder."""
    with tempfile.TemporaryDirectory(prefix="straw-", dir=root) as folder:
        program = f"import sys; sys.path.insert(0, {package!r})\n{STRAW}"
        command = [sys.executable, "-c", program, folder, str(count), str(size)]
        told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1200).stdout
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    return found


def main(count: int, size: int, turns: int) -> None:
    """Measure in turns, show, write."""
    found: dict[str, list[dict[str, Any]]] = {"Ray": [], "straw, in memory": [], "straw, on a disk": []}
    with straw() as package:
        for _ in range(turns):
            found["Ray"].append(by_ray(count, size))
            found["straw, in memory"].append(by_straw(package, Path("/dev/shm"), count, size))
            found["straw, on a disk"].append(by_straw(package, Path(tempfile.gettempdir()), count, size))
    assert len({one["sum"] for each in found.values() for one in each}) == 1, found
    table = Table("", "write GB/s", "read GB/s", title=f"{count} blocks of {size / 2**20:.0f} MiB, best of {turns}")
    rates = {
        name: {way: count * size / 1e9 / min(one[f"{way}_s"] for one in each) for way in ("write", "read")}
        for name, each in found.items()
    }
    for name, each in rates.items():
        table.add_row(name, f"{each['write']:.2f}", f"{each['read']:.2f}")
    Console().print(table)
    write("sample_store", {"blocks": count, "bytes": size, "straw": VERSION, "rates": rates, "turns": found}, None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--mb", type=int, default=16, help="MiB of a block")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    main(options.blocks, options.mb * 2**20, options.turns)
