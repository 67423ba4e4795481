"""Seconds until a run that has lost a rank does a further step, beside those of a new start. One command:

    python -m bench.recovery [--turns 3] [--seed 1]

A run of small steps loses its rank (`kill -9`) at a random moment, recovers by itself, from its last checkpoint and its journal,
and is timed until it has done a step that it had not done. Then its driver is killed as often, and what is timed begins with the
command that goes on with it. So is the first start, to its first step. The limit is 30 s on a machine that does nothing else.
Writes bench/results/recovery.json.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.support.measure import summary, write
from tests.end_to_end.harness import Driver, is_rank, start
from tools.make_arithmetic import make_arithmetic
from tools.make_tiny_model import make_tiny_model

LONGEST_S, POLL_S = 600.0, 0.02
LIMIT_S, EVERY = 30.0, 5  # steps between checkpoints
SETTING = (
    "run.name=recovery",
    "train.steps=1000",
    f"train.save_every={EVERY}",
    "data.eval=null",
    "cluster.max_recoveries=20",
)

console = Console()


def last_step(driver: Driver) -> int:
    """Whose line is written."""
    return max((row["step"] for row in driver.metrics()), default=0)


def seconds_to(driver: Driver, step: int) -> float:
    """From now until the line of this step is there. Raises RuntimeError where the run ends before."""
    began = time.monotonic()
    while last_step(driver) < step:
        if driver.process.poll() is not None or time.monotonic() - began > LONGEST_S:
            raise RuntimeError(f"step {step} did not come: {driver.finish(10)}")
        time.sleep(POLL_S)
    return time.monotonic() - began


def turn(driver: Driver, dice: random.Random, victim: list[int]) -> tuple[int, int]:
    """Let it do some steps, and kill. The last step that it had done, and how many since its checkpoint."""
    seconds_to(driver, last_step(driver) + 2 + dice.randrange(EVERY))
    time.sleep(dice.uniform(0, 1))
    for pid in victim or driver.pids(is_rank):
        os.kill(pid, signal.SIGKILL)
    return last_step(driver), last_step(driver) % EVERY


def measure(folder: Path, turns: int, seed: int) -> dict[str, Any]:
    """All starts of one run."""
    dice, driver = random.Random(seed), start(folder, *SETTING)
    try:
        first_s = seconds_to(driver, 1)
        console.print(f"first step after {first_s:.1f} s")
        recovered, continued = [], []
        for _ in range(turns):
            step, since = turn(driver, dice, [])
            recovered.append({"seconds": seconds_to(driver, step + 1), "made_again": since})
            console.print(f"recovered: {recovered[-1]}")
        rows = driver.metrics()
        assert rows[-1]["perf/recoveries"] == turns, rows[-1]
        for _ in range(turns):
            step, since = turn(driver, dice, [driver.process.pid])
            driver.process.wait()
            driver.assert_nothing_left(within_s=60)
            driver = start(folder, *SETTING, "--continue")
            continued.append({"seconds": seconds_to(driver, step + 1), "made_again": since})
            console.print(f"continued: {continued[-1]}")
    finally:
        driver.end()
    return {
        "first_start_s": first_s,
        "recovered": recovered,
        "continued": continued,
        "recovered_s": summary([each["seconds"] for each in recovered]),
        "continued_s": summary([each["seconds"] for each in continued]),
        "step_s": summary([row["perf/step_s"] for row in rows if row["step"] > 1])["median"],
        "limit_s": LIMIT_S,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="br-", dir="/tmp") as name:
        make_tiny_model(Path(name, "model"), hidden_size=64)
        make_arithmetic(Path(name, "data"), num_train=64, num_eval=8, num_sft=64)
        write("recovery", measure(Path(name), args.turns, args.seed), None)


if __name__ == "__main__":
    main()
