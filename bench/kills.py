"""`kill -9` of every kind of process of a run in every phase of a step, beside the same run in peace. One command:

    python -m bench.kills [--minutes 25] [--seed 1] [--only rank/update,driver/save] [--folder /tmp/kills]

A run loses one process a step: the driver is stopped as it enters the phase, the process is killed, and the driver let go on. A
run that ends is gone on with by `--continue`. In the end the weights have to be those of the run in peace, to the bit, and so
have all metrics of actor, reward and evaluation at every step. Servers answer deterministically, so that what had not finished is
sampled again as it would have been. Adds what was killed to bench/results/kills.json, until the minutes are over: cells that
were not run, or not the same, in an order that the seed decides. What does not come about in two runs is said, with what was
seen. Writes docs/kills.md; exits with an error where a run failed or was not the same, and keeps its folder.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.support.killed_runs import KINDS, LONGEST_S, PHASES, Cell, Sought, Struck
from bench.support.measure import RESULTS, write
from tests.end_to_end.harness import start
from tools.make_arithmetic import make_arithmetic
from tools.make_tiny_model import make_tiny_model

STEPS, EVERY = 14, 2  # of a run; steps between checkpoints and evaluations
TRIES = 2  # runs in which a cell may come about
SETTING = (
    f"train.steps={STEPS}",
    f"train.save_every={EVERY}",
    "train.keep_last=1",
    f"eval.every={EVERY}",
    "rollout.deterministic=true",
    "rollout.max_restarts=99",
    "rollout.max_response_tokens=32",
    "actor.micro_batch_tokens=512",
    "reward.fn=bench.support.killed_runs:graded",
)
SAME = re.compile(r"(actor|reward|eval)/|rollout/(num_samples|response_len|truncated|logprob_diff)")
PAGE = Path(__file__).parent.parent / "docs" / "kills.md"
PEACE = "peace"
FAILURES = (RuntimeError, AssertionError, subprocess.TimeoutExpired)
WORDS = {
    "went on": "went on",
    "recovered": "recovered by itself",
    "ended": "ended, gone on with",
    "failed": "**failed**",
    "absent": "does not come about",
}

console = Console()


def learned(run: Path) -> dict[int, dict[str, Any]]:
    """What has to be the same, by step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: {name: row[name] for name in row if SAME.match(name)} for row in rows}


def compare(run: Path, peace: Path) -> dict[str, Any]:
    """Whether weights and metrics of the run in this folder are those of the one in peace; the first metric that is not."""
    files = [each / "hf" / "model.safetensors" for each in (run, peace)]
    mine, theirs = learned(run), learned(peace)
    differing = [
        f"step {step}: {name}"
        for step in theirs
        for name in theirs[step]
        if mine.get(step, {}).get(name) != theirs[step][name]
    ]
    return {
        "same_weights": files[0].read_bytes() == files[1].read_bytes(),
        "same_metrics": not differing and mine.keys() == theirs.keys(),
        "first": differing[:1],
    }


def is_same(cell: dict[str, Any]) -> bool:
    """Whether it was run, to the end, and nothing is other."""
    return bool(cell.get("same_weights") and cell.get("same_metrics"))


def render(cells: list[dict[str, Any]]) -> str:
    """The page."""
    lines = [
        "# Kills",
        "",
        "Made by `python -m bench.kills`: a process of a run is killed by `kill -9` while the driver is in the phase. What",
        "became of the run: it went on, with another process in the place of the dead one; it recovered by itself, from its last",
        "checkpoint and journal ([journal](journal.md)); or it ended, and was gone on with by `--continue`, as where the driver",
        f"itself is killed. Runs of {STEPS} steps on CPU lose one process after the other; a checkpoint and an evaluation every",
        f"{EVERY}, synchronous, `rollout.deterministic`. Each is compared with the run in peace: the weights in the end, bit for",
        "bit, and all metrics of actor, reward and evaluation at every step, to the last digit. Empty: not run yet.",
        "",
        f"| killed | {' | '.join(PHASES)} |",
        f"|---|{'---|' * len(PHASES)}",
    ]
    by_cell = {(cell["kind"], cell["phase"]): cell for cell in cells}
    for kind in KINDS:
        row = [by_cell.get((kind, phase)) for phase in PHASES]
        lines.append(f"| {kind} | {' | '.join(_told(cell) for cell in row)} |")
    ran = [cell for cell in cells if cell["then"] != "absent"]
    absent = f" {len(cells) - len(ran)} do not come about." if len(ran) < len(cells) else ""
    lines += [
        "",
        f"{len(ran)} of {len(KINDS) * len(PHASES)} cells were run; in {sum(map(is_same, ran))} of them weights and metrics are "
        f"the same.{absent}",
    ]
    return "\n".join([*lines, ""])


def _told(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    word = WORDS[cell["then"]]
    if is_same(cell):
        return word
    if "why" in cell:
        return f"{word}: {cell['why']}"
    return f"{word}; **others** from {', '.join(cell['first']) or 'the weights'} on"


def strike_all(struck: Struck, cells: Sequence[Cell], first: int, last: int) -> list[Sought]:
    """Lose the process of one cell after the other, from the first step on and before the last: those that were missed."""
    step, waiting, missed = first, list(cells), []
    while waiting and step < last:
        # Where a step has neither a checkpoint nor an evaluation, another cell is taken first.
        fits = [each for each in waiting if each.phase not in ("save", "evaluate") or step % EVERY == 0]
        if not fits:
            step += 1
            continue
        # What dies in a start ends that life: the next one may lose another.
        cell = next((each for each in fits if each.phase == "start"), fits[0])
        waiting.remove(cell)
        console.print(f"{time.strftime('%H:%M:%S')} step {step}: {cell.name}")
        sought = struck.strike(cell, step)
        if sought is not None:
            missed.append(sought)
        elif cell.phase != "start":
            step = max(step, struck.cells[-1]["step"] or 0) + 1
    return missed


def run_cells(folder: Path, name: str, cells: list[Cell]) -> tuple[list[dict[str, Any]], list[Sought]]:
    """A run that loses the process of one cell after the other: those that were met, and what was seen of others.

    A run that fails gives the cell of which it did.
    """
    struck, missed = Struck.begin(folder, name, SETTING), list[Sought]()
    try:
        missed = strike_all(struck, cells, 1, STEPS)
        struck.finish()
    except FAILURES as error:
        struck.driver.end()
        (folder / f"{name}.error").write_text(str(error))
        if not struck.cells:
            raise
        failed = {key: struck.cells[-1][key] for key in ("kind", "phase", "step")}
        return [{**failed, "then": "failed", "why": (str(error).splitlines() or [type(error).__name__])[0]}], missed
    found = compare(folder / "runs" / name, folder / "runs" / PEACE)
    return [{**cell, **found} for cell in struck.cells], missed


def run_in_peace(folder: Path) -> None:
    """Unless the folder has it already. Raises RuntimeError where it fails."""
    if (folder / "runs" / PEACE / "hf" / "model.safetensors").exists():
        return
    make_tiny_model(folder / "model", hidden_size=64)
    make_arithmetic(folder / "data", num_train=64, num_eval=8, num_sft=64)
    code, _, error = start(folder, f"run.name={PEACE}", *SETTING).finish(LONGEST_S)
    if code:
        raise RuntimeError(error)


def main() -> None:
    """Runs of some cells each, until the time is over or no cell is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25.0, help="no further run begins after so many")
    parser.add_argument("--seed", type=int, default=1, help="decides the order")
    parser.add_argument("--each", type=int, default=8, help="cells of one run")
    parser.add_argument("--only", default="", help="cells as kind/phase, separated by commas; also those that were run")
    parser.add_argument("--folder", type=Path, help="of the runs, which are kept; its run in peace is made once")
    args = parser.parse_args()
    result = RESULTS / "kills.json"
    known = json.loads(result.read_text())["cells"] if result.exists() else []
    everything = [Cell(kind, phase) for kind in KINDS for phase in PHASES]
    done = {Cell(cell["kind"], cell["phase"]) for cell in known if is_same(cell)}
    left = [cell for cell in everything if (cell.name in args.only.split(",") if args.only else cell not in done)]
    random.Random(args.seed).shuffle(left)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="kills-", dir="/tmp"))
    folder.mkdir(exist_ok=True)
    run_in_peace(folder)
    good = run_all(folder, left, known, args.each, time.monotonic() + 60 * args.minutes)
    if not good:
        sys.exit(f"A run failed, or was not the same: {folder}")
    if args.folder is None:
        shutil.rmtree(folder)


def run_all(folder: Path, left: Sequence[Cell], known: list[dict[str, Any]], each: int, end: float) -> bool:
    """Runs of so many cells each; whether all were the same. Writes what is known after each of them."""
    tries, good, first = Counter[Cell](), True, sum(1 for _ in folder.glob("runs/struck-*"))
    while left and time.monotonic() < end:
        some, left, first = left[:each], left[each:], first + 1
        made, missed = run_cells(folder, f"struck-{first}", list(some))
        met = {Cell(cell["kind"], cell["phase"]) for cell in made}
        tries.update(sought.cell for sought in missed)
        given_up = [sought for sought in missed if tries[sought.cell] >= TRIES]
        made += [
            {"kind": sought.cell.kind, "phase": sought.cell.phase, "then": "absent", "why": sought.why}
            for sought in given_up
        ]
        gone = {sought.cell for sought in given_up} | met
        left = [*left, *(cell for cell in some if cell not in gone)]
        known = [cell for cell in known if Cell(cell["kind"], cell["phase"]) not in gone] + made
        good = good and all(is_same(cell) or cell["then"] == "absent" for cell in made)
        for cell in made:
            console.print(cell)
        # What was done is kept where the rest is not.
        write("kills", {"cells": known}, None)
        PAGE.write_text(render(known))
    return good


if __name__ == "__main__":
    main()
