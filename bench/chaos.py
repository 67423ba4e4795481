"""An asynchronous run under fire, beside the same one in peace. One command:

    python -m bench.chaos [--strikes 50] [--steps 200] [--seed 1]

Servers, their schedulers, the router and the collectors are killed (SIGKILL) and frozen (SIGSTOP) at random steps; the seed says
which, when and how. Prints each strike with the seconds until its victim was back, and for both runs the reward of the last
steps and the held-out accuracy. The strikes cost time; they must cost no sample and no step.
Writes bench/results/chaos.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.support.killed_runs import ASYNCHRONOUS
from bench.support.measure import write
from tests.end_to_end import chaos
from tests.end_to_end.harness import Driver, start
from tools.make_arithmetic import make_arithmetic
from tools.make_tiny_model import make_tiny_model

LAST = 20  # steps whose rewards are compared
LONGEST_S = 4 * 3600.0
SETTING = (*ASYNCHRONOUS, "train.save_every=1000")


def run(folder: Path, name: str, args: argparse.Namespace, strikes: int) -> dict[str, Any]:
    """One run, struck so often. Raises RuntimeError where it fails."""
    began = time.monotonic()
    driver: Driver = start(folder, f"run.name={name}", *SETTING, f"run.seed={args.seed}", f"train.steps={args.steps}")
    try:
        plans = chaos.plans(args.seed, strikes, 1, args.steps - 4) if strikes else []
        done = chaos.strike_all(driver, plans)
        code, _, error = driver.finish(LONGEST_S)
    finally:
        driver.end()
    if code:
        raise RuntimeError(f"{name} ended with code {code} after {len(done)} strikes:\n{error}")
    driver.assert_nothing_left()
    rows = [row for row in driver.metrics() if row["step"]]
    seconds = chaos.seconds_until_back(done, chaos.events(driver))
    wanted = rows[0]["rollout/num_samples"]
    return {
        "steps": len(rows),
        "seconds": time.monotonic() - began,
        "samples_lost": sum(wanted - row["rollout/num_samples"] + row["rollout/failed"] for row in rows),
        "groups_made_anew": rows[-1]["rollout/groups_lost"],
        "reward_before": statistics.mean(row["reward/mean"] for row in rows[:LAST]),
        "reward_after": statistics.mean(row["reward/mean"] for row in rows[-LAST:]),
        "accuracy": next(row["eval/accuracy"] for row in reversed(rows) if "eval/accuracy" in row),
        "eval_reward": next(row["eval/reward"] for row in reversed(rows) if "eval/reward" in row),
        "strikes": [
            {"step": each.step, "victim": each.victim, "signal": each.signal, "back_after_s": back}
            for each, back in zip(done, seconds, strict=True)
        ],
    }


def show(runs: dict[str, dict[str, Any]]) -> None:
    """The strikes, then both runs side by side."""
    console = Console()
    table = Table("step", "victim", "signal", "back after, s", title="strikes")
    for each in runs["struck"]["strikes"]:
        back = each["back_after_s"]
        table.add_row(
            str(each["step"]), each["victim"], each["signal"], "not told apart" if back is None else f"{back:.0f}"
        )
    console.print(table)
    table = Table("", *runs, title="runs")
    for name in (key for key in runs["struck"] if key != "strikes"):
        table.add_row(name, *(f"{each[name]:.4g}" for each in runs.values()))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strikes", type=int, default=50)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    make_tiny_model(folder / "model", hidden_size=64)
    make_arithmetic(folder / "data", num_train=64, num_eval=8, num_sft=64)
    runs = {name: run(folder, name, args, strikes) for name, strikes in (("struck", args.strikes), ("in_peace", 0))}
    show(runs)
    write("chaos", {"seed": args.seed, **runs}, None)


if __name__ == "__main__":
    main()
