"""What sandboxes cost: until a program runs, for a whole run, and 200 of them at once with their memory.

    python -m bench.sandbox [--at-once N]

A program says when it begins, by the clock that all processes share. Pooled: a sandbox waits for it. Cold: none does, as one
takes all and each job comes right behind the other. A bare Python that does the same, `python -I -S`, is beside them in the
same turn.
Exit code 0 only where the pooled start is under 20 ms (median) and all that run at once answer.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.support.measure import write
from megarl.sandbox import watch
from megarl.sandbox.job import MIB, Limits
from megarl.sandbox.pool import SandboxPool

PROGRAM = "import time; print(time.monotonic())"
LIMITS = Limits(memory_bytes=128 * MIB, timeout_s=120, cpu_s=60)
TARGET_MS = 20.0
PAUSE_S = 0.15  # in which the next sandbox gets ready
TOGETHER_S, QUICK_S = 20.0, 3.0  # how long those at once stay, so that all are there


def percentiles(values: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ranked = sorted(values)
    return {"median": statistics.median(ranked) * 1e3, "p95": ranked[int(0.95 * (len(ranked) - 1))] * 1e3}


def bare(count: int) -> list[float]:
    """Seconds until a Python without a sandbox runs."""
    found = []
    for _ in range(count):
        began = time.monotonic()
        said = subprocess.run([sys.executable, "-I", "-S", "-c", PROGRAM], capture_output=True, text=True, check=True)
        found.append(float(said.stdout) - began)
    return found


async def starts(pool: SandboxPool, count: int, pause_s: float) -> tuple[list[float], list[float]]:
    """Seconds until each program runs, and until its result is there, one after the other."""
    until_it_runs, whole = [], []
    for _ in range(count):
        await asyncio.sleep(pause_s)
        began = time.monotonic()
        result = await pool.run(PROGRAM)
        whole.append(time.monotonic() - began)
        until_it_runs.append(float(result.stdout) - began)
    return until_it_runs, whole


async def rate(pool: SandboxPool, count: int) -> dict[str, float]:
    """Runs a second where many wait, and the CPU seconds of one: of the keeper and all below it."""
    keeper = keeper_of(pool)
    cpu, began = watch.usage(keeper, memory=False).cpu_s, time.monotonic()
    await asyncio.gather(*(pool.run(PROGRAM) for _ in range(count)))
    seconds = time.monotonic() - began
    return {"per_s": count / seconds, "cpu_ms": (watch.usage(keeper, memory=False).cpu_s - cpu) / count * 1e3}


async def at_once(count: int, stay_s: float) -> dict[str, Any]:
    """So many that run at the same time: how soon all are ready, and the memory of one."""
    program = f"import time\nprint(time.monotonic(), flush=True)\ntime.sleep({stay_s})\nprint(time.monotonic())"
    free = available_bytes()
    began = time.monotonic()
    async with SandboxPool(LIMITS, count) as pool:
        runs = [asyncio.ensure_future(pool.run(program)) for _ in range(count)]
        await asyncio.sleep(stay_s * 0.9)
        processes = list(watch.tree(keeper_of(pool)))
        together = {
            "processes": len(processes),
            "pss_bytes": sum(map(pss_bytes, processes)),
            "machine_bytes": free - available_bytes(),
        }
        results = await asyncio.gather(*runs)
    spans = [tuple(map(float, result.stdout.split())) for result in results if result.ended == "ok"]
    first_end = min((end for _, end in spans), default=0.0)
    return together | {
        "asked": count,
        "answered": len(spans),
        "overlapped": sum(start < first_end for start, _ in spans),
        "all_running_s": max((start for start, _ in spans), default=0.0) - began,
        "closed_s": time.monotonic() - max((end for _, end in spans), default=0.0),
    }


def keeper_of(pool: SandboxPool) -> int:
    assert pool._process is not None
    return pool._process.pid


def pss_bytes(pid: int) -> int:
    """What a process holds, its share of shared pages with it."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0  # it ended meanwhile
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) * 1024


def available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024


async def measure(count: int, together: int, stay_s: float) -> dict[str, Any]:
    async with SandboxPool(LIMITS, 4) as pool:
        pooled, whole = await starts(pool, count, PAUSE_S)
        throughput = await rate(pool, count)
        memory = pool.in_force.memory
    async with SandboxPool(LIMITS, 1) as pool:
        await pool.run(PROGRAM)
        cold, _ = await starts(pool, count, 0.0)
    return {
        "memory": memory,
        "pooled_ms": percentiles(pooled),
        "run_ms": percentiles(whole),
        "cold_ms": percentiles(cold),
        "bare_ms": percentiles(bare(count)),
        "rate": throughput,
        "at_once": await at_once(together, stay_s),
    }


def main(*, quick: bool = False, out: Path | None = None, together: int = 200) -> None:
    result = asyncio.run(measure(5, 2, QUICK_S) if quick else measure(100, together, TOGETHER_S))
    write("sandbox", result, out)
    print(result)
    several = result["at_once"]
    if several["overlapped"] != several["asked"] or (result["pooled_ms"]["median"] > TARGET_MS and not quick):
        sys.exit(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, default=200)
    main(together=parser.parse_args().at_once)
