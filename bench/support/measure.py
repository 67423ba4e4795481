"""What benchmarks share: fresh processes, peaks of memory, pairs of timings, and how a result is written."""

from __future__ import annotations

import argparse
import json
import os
import platform as host
import re
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from megarl.core.platform import get_platform, held_bytes, peak_bytes, reset_peak_bytes
from megarl.core.versions import installed

RESULTS = Path(__file__).parent.parent / "results"
PACKAGES = ("torch", "megatron-core", "transformers")
P = ParamSpec("P")
T = TypeVar("T")


def no_options(description: str | None) -> None:
    """Answer `--help`, and refuse whatever else is given to a benchmark of which nothing can be chosen."""
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=description, formatter_class=form).parse_args()


def in_fresh_process(threads: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What the function returns in a process of its own, where torch has so many threads: nothing was held before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_with_threads, threads, function, args, kwargs).result()


def in_fresh_ranks(num_ranks: int, function: Callable[..., T], *args: Any) -> list[T]:
    """What function(rank, *args) returns in as many processes of one thread at once, by rank."""
    with ProcessPoolExecutor(num_ranks, mp_context=get_context("spawn")) as pool:
        ranks = [pool.submit(_with_threads, 1, function, (rank, *args), {}) for rank in range(num_ranks)]
        return [rank.result() for rank in ranks]


def _with_threads(threads: int, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    # As the processes of a run start, before torch takes any memory; a rank reads the threads.
    os.environ.update(get_platform().env | {"OMP_NUM_THREADS": str(threads)})
    import torch

    torch.set_num_threads(threads)
    return function(*args, **kwargs)


class Peak:
    """Most bytes held within a block, beyond what was held before it; set when the block ends."""

    bytes: int = 0


@contextmanager
def peak() -> Iterator[Peak]:
    """Measure a block of code on this machine's platform. Resident memory is counted in pages."""
    platform, result = get_platform(), Peak()
    before = held_bytes(platform)
    reset_peak_bytes(platform)
    yield result
    result.bytes = peak_bytes(platform) - before


def alternate(sides: dict[str, Callable[[], object]], repeats: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Seconds of each side's calls, taken in turns: a machine that slows down meanwhile does not favour a side."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(warm_up + repeats):
        for name, call in sides.items():
            began = time.perf_counter()
            call()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def ratios(seconds: dict[str, list[float]], over: str, under: str) -> list[float]:
    """Seconds of one side over those of the other, in each turn."""
    return [one / other for one, other in zip(seconds[over], seconds[under], strict=True)]


def summary(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def _cpu() -> str | None:
    """What the processor calls itself; None where the system does not say."""
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    return found[1] if found else None


def write(name: str, result: dict[str, Any], folder: Path | None) -> None:
    """Write the result beside facts of the machine. folder: bench/results where not given."""
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    machine = {
        "date": date.today().isoformat(),
        "machine": host.machine(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "packages": {package: installed(package) for package in PACKAGES},
    }
    (folder / f"{name}.json").write_text(json.dumps({**result, "host": machine}, indent=1) + "\n")
