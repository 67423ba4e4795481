"""`kill -9` of every kind of process of a run, at random moments, beside the same run in peace. One command:

    python -m bench.kills [--times 2] [--seed 1] [--kinds driver,rank]

What the run does not survive is gone on with by `--continue`. In the end the weights have to be those of the run in peace, to
the bit, and so have all metrics of actor, reward and evaluation at every step. Servers answer deterministically, so that what had
not finished is sampled again as it would have been. Prints each kill, and writes bench/results/kills.json and docs/kills.md.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.support.measure import write
from tests.end_to_end.chaos import VICTIMS
from tests.end_to_end.harness import Driver, is_rank, start
from tools.make_arithmetic import make_arithmetic
from tools.make_tiny_model import make_tiny_model

KINDS: Mapping[str, Callable[[str], bool]] = {
    "driver": lambda command: False,  # known as itself
    "rank": is_rank,
    **VICTIMS,
    "coordinator": lambda command: command.startswith("ray::CoordinatorActor"),
    "raylet": lambda command: "raylet/raylet" in command.split(" ")[0],
    "grader": lambda command: "megarl.rewards.worker" in command,
}
STEPS, LONGEST_S, SPREAD_S = 6, 600.0, 1.2
SETTING = (
    f"train.steps={STEPS}",
    "train.save_every=2",
    "train.keep_last=1",
    "eval.every=2",
    "rollout.deterministic=true",
    "rollout.max_response_tokens=48",
    "actor.micro_batch_tokens=512",
)
SAME = re.compile(r"(actor|reward|eval)/|rollout/(num_samples|response_len|truncated|logprob_diff)")
PHASE = re.compile(r"The run was (?:in step (\d+) of \d+ \((\w+)\)|in its (\w+))")
PAGE = Path(__file__).parent.parent / "docs" / "kills.md"


def learned(driver: Driver) -> dict[int, dict[str, Any]]:
    """What has to be the same, by step."""
    return {row["step"]: {name: row[name] for name in row if SAME.match(name)} for row in driver.metrics()}


def struck(folder: Path, name: str, kind: str, dice: random.Random) -> tuple[Driver, dict[str, Any]]:
    """A run of which one process was killed, gone on with until it ended, and what became of it."""
    driver = start(folder, f"run.name={name}", *SETTING)
    after, wait_s = dice.randint(0, STEPS - 1), dice.random() * SPREAD_S
    driver.wait_for_step(after)
    time.sleep(wait_s)
    pids = [driver.process.pid] if kind == "driver" else sorted(driver.pids(KINDS[kind]))
    if not pids:
        driver.end()
        raise RuntimeError(f"No {kind} is there to be killed: is its command line still as KINDS has it?")
    os.kill(dice.choice(pids), signal.SIGKILL)
    found: dict[str, Any] = {"kind": kind, "after_step": after, "phase": "", "survived": False}
    code, _, error = driver.finish(LONGEST_S)
    if code == 0:
        return driver, {**found, "survived": True}
    driver.assert_nothing_left()
    if match := PHASE.search(error):
        found["phase"] = f"step {match[1]}, {match[2]}" if match[1] else match[3]
    began = time.monotonic()
    driver = start(folder, f"run.name={name}", *SETTING, "--continue")
    code, _, error = driver.finish(LONGEST_S)
    if code:
        raise RuntimeError(f"{name}, gone on with after a kill of a {kind}, ended with code {code}:\n{error}")
    return driver, {**found, "second_life_s": time.monotonic() - began}


def compare(driver: Driver, peace: Driver) -> dict[str, Any]:
    """Whether weights and metrics are those of the run in peace; the first metric that is not."""
    files = [each.folder / "hf" / "model.safetensors" for each in (driver, peace)]
    mine, theirs = learned(driver), learned(peace)
    differing = [
        f"step {step}: {name}"
        for step in theirs
        for name in theirs[step]
        if mine.get(step, {}).get(name) != theirs[step][name]
    ]
    same = files[0].read_bytes() == files[1].read_bytes()
    return {
        "same_weights": same,
        "same_metrics": not differing and mine.keys() == theirs.keys(),
        "first": differing[:1],
    }


def render(cells: list[dict[str, Any]]) -> str:
    """The page."""
    lines = [
        "# Kills",
        "",
        "Made by `python -m bench.kills`: one process of a run killed by `kill -9` at a random moment; where the run ended,",
        f"gone on with by `--continue`. {STEPS} steps on CPU, a checkpoint and an evaluation every 2, synchronous,",
        "`rollout.deterministic`. Compared with the run in peace: the weights in the end, bit for bit, and all metrics of",
        "actor, reward and evaluation at every step, to the last digit. The phase is what the driver said that it was in; one",
        "that was killed itself says nothing, and a run that went on had no reason to.",
        "",
        "| killed | after step | phase | the run | weights | metrics |",
        "|---|---|---|---|---|---|",
    ]
    for cell in cells:
        went = "went on" if cell["survived"] else "ended, and was gone on with"
        weights = "the same" if cell["same_weights"] else "**others**"
        metrics = "the same" if cell["same_metrics"] else f"**others**: {', '.join(cell['first'])}"
        lines.append(
            f"| {cell['kind']} | {cell['after_step']} | {cell['phase'] or 'not known'} | {went} | {weights} | {metrics} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """All kinds, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=2, help="kills of each kind")
    parser.add_argument("--seed", type=int, default=1, help="decides the moments")
    parser.add_argument("--kinds", default=",".join(KINDS), help="which, separated by commas")
    args = parser.parse_args()
    console, dice, cells = Console(), random.Random(args.seed), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_tiny_model(folder / "model", hidden_size=64)
        make_arithmetic(folder / "data", num_train=64, num_eval=8, num_sft=64)
        peace = start(folder, "run.name=peace", *SETTING)
        code, _, error = peace.finish(LONGEST_S)
        if code:
            raise RuntimeError(error)
        for time_ in range(args.times):
            for kind in args.kinds.split(","):
                driver, found = struck(folder, f"{kind}-{time_}", kind, dice)
                cells.append({**found, **compare(driver, peace)})
                console.print(cells[-1])
                # What was done is kept where the rest is not.
                write("kills", {"seed": args.seed, "cells": cells}, None)
                PAGE.write_text(render(cells))


if __name__ == "__main__":
    main()
