"""Random kills of everything in an asynchronous run, and its replay. One command:

    python -m bench.async_kills [--kills 20] [--steps 60] [--seed 1]

The run generates while it trains (`rollout.max_staleness: 1`). Every kind of process is killed (`kill -9`) at random moments; the
seed says which and when. It heals, recovers by itself, or ends and is gone on with by `--continue`. Then its journal is read:
each step took as many groups as it should, no group was taken by two steps, each that was asked for was taken, dropped for a
reason or is still waiting, and no token is older than the bound allows. Last `megarl replay` trains on the journal, without
servers: its weights have to be the run's, to the bit.
Writes bench/results/async_kills.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.support.killed_runs import ASYNCHRONOUS, KINDS, RECOVERED, STALENESS
from bench.support.measure import write
from megarl.rollout.decisions import read_decisions, standing
from megarl.rollout.journal import JOURNAL
from tests.end_to_end.harness import Driver, start
from tools.make_arithmetic import make_arithmetic
from tools.make_tiny_model import make_tiny_model

LONGEST_S, POLL_S = 900.0, 0.05
PROMPTS, SAMPLES = 4, 4  # as the harness's recipe has them
SETTING = (
    *ASYNCHRONOUS,
    "cluster.max_recoveries=20",
    "data.eval=null",
    "train.save_every=4",
    "train.journal_keep=all",
)

console = Console()


class Struck:
    """A run that loses processes, and is gone on with wherever it ends."""

    def __init__(self, folder: Path, steps: int) -> None:
        """Start it."""
        self.folder, self.settings = folder, ("run.name=struck", f"train.steps={steps}", *SETTING)
        self.driver: Driver = start(folder, *self.settings)
        self.continued = 0

    def wait_for(self, step: int) -> None:
        """Until that step has ended. Raises RuntimeError where it does not come."""
        end = time.monotonic() + LONGEST_S
        while max((row["step"] for row in self.driver.metrics()), default=-1) < step:
            if self.driver.process.poll() is not None:
                self.go_on()
            if time.monotonic() > end:
                raise RuntimeError(f"Step {step} did not end within {LONGEST_S:g} s.\n{self.driver.where()}")
            time.sleep(POLL_S)

    def go_on(self) -> None:
        """By --continue. Raises RuntimeError where the driver was not killed."""
        code, _, error = self.driver.finish(60)
        if code != -signal.SIGKILL:
            raise RuntimeError(f"The run ended with code {code}:\n{error}")
        self.driver.assert_nothing_left(within_s=60)
        self.continued += 1
        self.driver = start(self.folder, *self.settings, "--continue")

    def kill(self, kind: str, which: float) -> bool:
        """Kill one of a kind; whether there is one."""
        pids = [self.driver.process.pid] if kind == "driver" else sorted(self.driver.pids(KINDS[kind]))
        if pids:
            os.kill(pids[int(which * len(pids))], signal.SIGKILL)
        return bool(pids)


def strike(run: Struck, kills: int, steps: int, seed: int) -> list[dict[str, Any]]:
    """Each kind of process in its turn, the order and the moments by chance."""
    dice, done = random.Random(seed), []
    kinds = [kind for _ in range(-(-kills // len(KINDS))) for kind in dice.sample(list(KINDS), len(KINDS))][:kills]
    at = sorted(dice.sample(range(1, steps - 2), kills))
    for kind, step in zip(kinds, at, strict=True):
        run.wait_for(step)
        time.sleep(dice.uniform(0, 1.5))  # somewhere in the step
        if run.driver.process.poll() is not None:
            run.go_on()
            run.wait_for(step)
        met = run.kill(kind, dice.random())
        done.append({"kind": kind, "step": step, "met": met})
        console.print(done[-1])
    run.wait_for(steps)
    code, _, error = run.driver.finish(LONGEST_S)
    if code:
        raise RuntimeError(f"The run ended with code {code}:\n{error}")
    run.driver.assert_nothing_left(within_s=60)
    return done


def book(driver: Driver, steps: int) -> dict[str, Any]:
    """What the journal and the metrics say of samples."""
    journal = driver.folder / JOURNAL
    made = standing(read_decisions(journal, 0))
    by_kind = {
        kind: [key for each in made if each.kind == kind for key in each.groups] for kind in ("admitted", "taken")
    }
    dropped = {key for each in made if each.kind in ("dull", "late") for key in each.groups}
    taken = {each.step: len(each.groups) for each in made if each.kind == "taken"}
    asked, used = Counter(by_kind["admitted"]), Counter(by_kind["taken"])
    open_ones = set(asked) - set(used) - dropped
    oldest = min((step for _, step, _ in open_ones), default=steps)
    rows = [row for row in driver.metrics() if row["step"]]
    return {
        "groups": len(used),
        "asked_twice": sum(count > 1 for count in asked.values()),
        "taken_twice": sum(count > 1 for count in used.values()),
        "taken_unasked": len(set(used) - set(asked)),
        # What is still under way was asked for by the last steps.
        "lost": sum(step <= steps - 2 for _, step, _ in open_ones),
        "oldest_open": oldest,
        "steps_short": sum(taken.get(step, 0) != PROMPTS for step in range(1, steps + 1)),
        "rows_wrong": [row["step"] for row in rows] != list(range(1, steps + 1)),
        "samples_short": sum(row["rollout/num_samples"] != PROMPTS * SAMPLES for row in rows),
        "staleness_max": max(row.get("rollout/staleness_max", 0) for row in rows),
        "unwritten": len(set(used) - written(journal)),
    }


def written(journal: Path) -> set[tuple[int, int, int]]:
    """Groups whose samples are all in the journal."""
    found: dict[tuple[int, int, int], set[int]] = {}
    for path in journal.glob("step_*-*.sqlite"):
        step = int(path.name.removeprefix("step_").partition("-")[0])
        with closing(sqlite3.connect(path)) as file:
            for row, first, position in file.execute("select row, first, position from samples"):
                found.setdefault((row, step, first), set()).add(position)
    return {key for key, positions in found.items() if len(positions) == SAMPLES}


def replayed(run: Struck) -> dict[str, Any]:
    """`megarl replay` of the whole run: its weights and metrics beside the run's."""
    began = time.monotonic()
    driver = start(run.folder, command="replay", run=run.driver.folder)
    code, said, error = driver.finish(LONGEST_S)
    if code:
        raise RuntimeError(f"The replay ended with code {code}:\n{error}")
    files = [run.driver.folder / each / "hf" / "model.safetensors" for each in ("", "replay-1")]
    return {
        "same_weights": files[0].read_bytes() == files[1].read_bytes(),
        "said": said.rstrip().splitlines()[-1],
        "seconds": time.monotonic() - began,
    }


def is_good(result: dict[str, Any]) -> bool:
    """Whether nothing was lost, doubled, too old or other."""
    counted = (
        "asked_twice",
        "taken_twice",
        "taken_unasked",
        "lost",
        "steps_short",
        "rows_wrong",
        "samples_short",
        "unwritten",
    )
    none = not any(result["book"][name] for name in counted)
    return none and result["book"]["staleness_max"] <= STALENESS and result["replay"]["same_weights"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ak-", dir="/tmp") as name:
        folder, began = Path(name), time.monotonic()
        make_tiny_model(folder / "model", hidden_size=64)
        make_arithmetic(folder / "data", num_train=64, num_eval=8, num_sft=64)
        run = Struck(folder, args.steps)
        try:
            done = strike(run, args.kills, args.steps, args.seed)
            log = (run.driver.folder / "logs" / "driver.log").read_text()
            result = {
                "seed": args.seed,
                "steps": args.steps,
                "seconds": time.monotonic() - began,
                "kills": done,
                "recoveries": len(RECOVERED.findall(log)),
                "continued": run.continued,
                "book": book(run.driver, args.steps),
                "replay": replayed(run),
            }
        finally:
            run.driver.end()
    console.print_json(json.dumps(result))
    write("async_kills", result, None)
    if not is_good(result):
        sys.exit("Something was lost, doubled, too old or other.")


if __name__ == "__main__":
    main()
