"""Asynchronous rollout at a scale that no test has: 512 servers and 65,536 samples a row, under a virtual clock.

    python -m bench.rollout_simulation

The coordinator, its ledger and its plans are the real ones; servers are simulated: each makes 4 responses at once, a token
of each every 20 ms, of log-normal length (sigma 1, mean 1,000, at most 4,096 tokens). 16 steps of 256 prompts with 16 samples
each; ranks take as long for a step as the servers would if none ever idled. In all rows ranks and servers have devices of
their own; `synchronous` and `oversample` let servers wait while ranks train, as they do where they share devices. Idle
shares are of the whole run: of the servers' slots, and of the ranks. Staleness is the mean over samples of versions that the
oldest token is behind. The last column is what the simulation of the row took of one core, most of it in the coordinator: it
shows what one process spends on 65,536 samples.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.support.measure import no_options, write
from bench.support.rollout_simulation import Driver, World, lengths_of, make_recipe
from bench.support.virtual_time import run_virtual
from megarl.rollout.tasks import GroupTask

SERVERS, SLOTS, COLLECTORS = 512, 4, 16
STEPS, PROMPTS, SAMPLES, LONGEST = 16, 256, 16, 4096
TOKEN_S, SYNC_S = 0.02, 5.0
LIMIT_S = 10.0  # of CPU time, for the whole table
ROWS: dict[str, tuple[bool, dict[str, Any]]] = {
    "synchronous": (False, {}),
    "oversample 1.25": (False, {"oversample": 1.25, "max_staleness": 1}),
    "max_staleness 1": (True, {"max_staleness": 1}),
    "max_staleness 2": (True, {"max_staleness": 2}),
    "max_staleness 4": (True, {"max_staleness": 4}),
}


def balanced_train_s(world: World, prompts: int) -> float:
    """Seconds of a training step that takes the ranks as long as a step's samples take servers that never idle."""
    groups = [GroupTask(row, row, 0, 0, SAMPLES) for row in range(prompts)]
    slots = world.slots * COLLECTORS
    return sum(sum(lengths_of(world, group)) for group in groups) * world.token_s / slots


async def measure(name: str, servers: int, prompts: int, steps: int) -> dict[str, Any]:
    beside, settings = ROWS[name]
    world = World(slots=servers * SLOTS // COLLECTORS, mean_tokens=1000.0, sigma=1.0, longest=LONGEST, token_s=TOKEN_S)
    recipe = make_recipe(prompts=prompts, samples=SAMPLES, steps=steps, longest=LONGEST, rollout=settings)
    train_s = balanced_train_s(world, prompts)
    driver = Driver(
        recipe,
        world,
        rows=prompts * steps * 2,
        beside=beside,
        collectors=COLLECTORS,
        shards=32,
        train_s=train_s,
        sync_s=SYNC_S,
    )
    await driver.start()
    took = [await driver.step(step) for step in range(1, steps + 1)]
    seconds = asyncio.get_running_loop().time()
    await driver.close()
    slots = world.slots * COLLECTORS
    behind = [each.version - min(span.version for span in spans) for each in took for spans in each.spans]
    return {
        "name": name,
        "samples": len(behind),
        "step_s": seconds / steps,
        "servers_idle": 1 - driver.busy_slot_s / (slots * seconds),
        "ranks_idle": 1 - steps * train_s / seconds,
        "staleness_mean": sum(behind) / len(behind),
        "staleness_max": max(behind),
    }


def main(*, quick: bool = False, out: Path | None = None) -> None:
    servers, prompts, steps = (64, 32, 4) if quick else (SERVERS, PROMPTS, STEPS)
    rows: list[dict[str, Any]] = []
    for name in ROWS:
        began = time.process_time()
        row = run_virtual(measure(name, servers, prompts, steps))
        rows.append({**row, "cpu_s": time.process_time() - began})
    table = Table(title=f"{servers} servers, {rows[0]['samples']:,} samples in {steps} steps; simulated")
    for column in ("run", "s a step", "speed-up", "servers idle", "ranks idle", "behind: mean, most", "CPU s"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['step_s']:.1f}",
            f"{rows[0]['step_s'] / row['step_s']:.2f}",
            f"{row['servers_idle']:.0%}",
            f"{row['ranks_idle']:.0%}",
            f"{row['staleness_mean']:.2f}, {row['staleness_max']}",
            f"{row['cpu_s']:.1f}",
        )
    Console().print(table)
    cpu_s = sum(row["cpu_s"] for row in rows)
    write("rollout_simulation", {"servers": servers, "limit_s": LIMIT_S, "cpu_s": cpu_s, "rows": rows}, out)
    if not quick:
        sys.exit(0 if cpu_s <= LIMIT_S else 1)


if __name__ == "__main__":
    no_options(__doc__)
    main()
