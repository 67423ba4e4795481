"""`kill -9` of every kind of process of a run in every phase of a step, beside the same run in peace. One command:

    python -m bench.kills [--minutes 25] [--seed 1] [--only rank/update,driver/save]

A run loses one process a step: the driver is stopped as it enters the phase, the process is killed, and the driver let go on. A
run that ends is gone on with by `--continue`. In the end the weights have to be those of the run in peace, to the bit, and so
have all metrics of actor, reward and evaluation at every step. Servers answer deterministically, so that what had not finished is
sampled again as it would have been. Adds what was killed to bench/results/kills.json, until the minutes are over; another seed
takes the cells in another order. Writes docs/kills.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.support.measure import RESULTS, write
from megarl.core.timing import PHASE_FILE, read_phase
from tests.end_to_end.chaos import VICTIMS
from tests.end_to_end.harness import Driver, is_coordinator, is_rank, is_raylet, start
from tools.make_arithmetic import make_arithmetic
from tools.make_tiny_model import make_tiny_model

KINDS: Mapping[str, Callable[[str], bool]] = {
    "driver": lambda command: False,  # known as itself
    "rank": is_rank,
    **VICTIMS,
    "coordinator": is_coordinator,
    "raylet": is_raylet,
    "grader": lambda command: "megarl.rewards.worker" in command,
}
# By what a reader calls them: the driver's name for it. A grade is within the rollout, once a grader works.
PHASES: Mapping[str, str] = {
    "start": "start",
    "generate": "rollout",
    "grade": "rollout",
    "log-probs": "logprobs",
    "update": "update",
    "sync": "sync",
    "save": "save",
    "evaluate": "eval",
}
STEPS, EVERY = 14, 2  # of a run; steps between checkpoints and evaluations
LONGEST_S, POLL_S = 900.0, 0.001
MARK, GRADE_S = "grading", 0.05
SETTING = (
    f"train.steps={STEPS}",
    f"train.save_every={EVERY}",
    "train.keep_last=1",
    f"eval.every={EVERY}",
    "rollout.deterministic=true",
    "rollout.max_restarts=99",
    "rollout.max_response_tokens=32",
    "actor.micro_batch_tokens=512",
    "reward.fn=bench.kills:graded",
)
SAME = re.compile(r"(actor|reward|eval)/|rollout/(num_samples|response_len|truncated|logprob_diff)")
RECOVERED = re.compile(r"^\S+ \S+ WARNING megarl\.run\.recovery: recovery \d+", re.MULTILINE)
PAGE = Path(__file__).parent.parent / "docs" / "kills.md"

console = Console()


def graded(prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
    """A share of digits; it takes a while, and who looks for a grader at work sees that there is one."""
    Path(tempfile.gettempdir(), MARK).touch()
    time.sleep(GRADE_S)
    return sum(character.isdigit() for character in response) / max(len(response), 1)


@dataclass(frozen=True)
class Cell:
    """A process of this kind is killed in this phase."""

    kind: str
    phase: str

    @property
    def name(self) -> str:
        """For people and for --only."""
        return f"{self.kind}/{self.phase}"


@dataclass
class Struck:
    """A run that loses one process after the other, and is gone on with wherever it ended. cells: what was killed so far."""

    folder: Path
    name: str
    driver: Driver
    cells: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def begin(cls, folder: Path, name: str) -> Struck:
        """Start it."""
        return cls(folder, name, start(folder, f"run.name={name}", *SETTING))

    @property
    def _phase_file(self) -> Path:
        return self.driver.folder / "logs" / PHASE_FILE

    def _recoveries(self) -> int:
        log = self.driver.folder / "logs" / "driver.log"
        return len(RECOVERED.findall(log.read_text())) if log.exists() else 0

    def go_on(self) -> None:
        """The driver has ended, by what was killed: start it again. Raises RuntimeError where it ended of anything else."""
        code, _, error = self.driver.finish(LONGEST_S)
        if not self.cells or self.cells[-1]["then"]:
            raise RuntimeError(f"{self.name} ended with code {code}, and nothing had been killed since:\n{error}")
        self.driver.assert_nothing_left(60)
        self.cells[-1]["then"] = "ended"
        self._phase_file.unlink(missing_ok=True)
        self.driver = start(self.folder, f"run.name={self.name}", *SETTING, "--continue")

    def settle(self) -> None:
        """What became of the run since the last kill, now that it has gone on."""
        if self.cells and not self.cells[-1]["then"]:
            recovered = self._recoveries() > self.cells[-1].pop("recoveries")
            self.cells[-1]["then"] = "recovered" if recovered else "went on"
        elif self.cells:
            self.cells[-1].pop("recoveries", None)

    def strike(self, cell: Cell, step: int) -> bool:
        """Kill, in this step or a later one where the phase is not met; whether it was met at all."""
        end, pids = time.monotonic() + LONGEST_S, []
        while time.monotonic() < end:
            if self.driver.process.poll() is not None:
                if self.driver.process.returncode == 0:
                    return False
                self.go_on()
                pids = []
            seen = read_phase(self._phase_file)
            if cell.phase == "start" and seen is not None and seen[0] is not None:
                return False  # this life has started
            if seen is not None and not pids and (cell.phase == "start" or (seen[0] or 0) >= step):
                pids = self._pids(cell)
            if pids and self._meets(cell, step, seen):
                if self._killed(cell, step, pids):
                    return True
                pids = []
            time.sleep(POLL_S)
        raise RuntimeError(f"{cell.name} did not come about in {LONGEST_S:g} s.\n{self.driver.where()}")

    def _pids(self, cell: Cell) -> list[int]:
        return [self.driver.process.pid] if cell.kind == "driver" else sorted(self.driver.pids(KINDS[cell.kind]))

    def _meets(self, cell: Cell, step: int, seen: tuple[int | None, str] | None) -> bool:
        if seen is None or seen[1] != PHASES[cell.phase]:
            return False
        if cell.phase == "start":
            return True
        if (seen[0] or 0) < step:
            return False
        began = self._phase_file.stat().st_mtime
        marks = self.driver.temp.glob(f"**/{MARK}") if cell.phase == "grade" else ()
        return cell.phase != "grade" or any(mark.stat().st_mtime > began for mark in marks)

    def _killed(self, cell: Cell, step: int, pids: list[int]) -> bool:
        """Kill one while the driver stands still in the phase; off where it has left it meanwhile."""
        self.driver.process.send_signal(signal.SIGSTOP)
        seen = read_phase(self._phase_file)
        try:
            if not self._meets(cell, step, seen):
                return False
            os.kill(pids[0], signal.SIGKILL)
        except ProcessLookupError:
            return False  # another has come in its place
        finally:
            self.driver.process.send_signal(signal.SIGCONT)
        self.settle()
        done = {"kind": cell.kind, "phase": cell.phase, "step": seen[0] if seen else None, "then": ""}
        self.cells.append({**done, "recoveries": self._recoveries()})
        return True

    def finish(self) -> None:
        """Until its last step. Raises RuntimeError where it does not come there."""
        while True:
            code, _, error = self.driver.finish(LONGEST_S)
            if code == 0:
                self.settle()
                return self.driver.assert_nothing_left(60)
            if not self.cells or self.cells[-1]["then"]:
                raise RuntimeError(f"{self.name} ended with code {code}:\n{error}")
            self.go_on()


def learned(driver: Driver) -> dict[int, dict[str, Any]]:
    """What has to be the same, by step."""
    return {row["step"]: {name: row[name] for name in row if SAME.match(name)} for row in driver.metrics()}


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


WORDS = {
    "went on": "went on",
    "recovered": "recovered by itself",
    "ended": "ended, gone on with",
}


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
    same = sum(cell["same_weights"] and cell["same_metrics"] for cell in cells)
    lines += [
        "",
        f"{len(cells)} of {len(KINDS) * len(PHASES)} cells were run; in {same} of them weights and metrics are the same.",
    ]
    return "\n".join([*lines, ""])


def _told(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    if cell["same_weights"] and cell["same_metrics"]:
        return WORDS[cell["then"]]
    return f"{WORDS[cell['then']]}; **others** from {', '.join(cell['first']) or 'the weights'} on"


def run_cells(folder: Path, name: str, cells: list[Cell], peace: Driver) -> list[dict[str, Any]]:
    """A run that loses the process of one cell after the other; those that were met, with how it ended."""
    struck, step, waiting = Struck.begin(folder, name), 1, list(cells)
    while waiting and step < STEPS:
        # Where a step has neither a checkpoint nor an evaluation, another cell is taken first.
        fits = [each for each in waiting if each.phase not in ("save", "evaluate") or step % EVERY == 0]
        if not fits:
            step += 1
            continue
        # What dies in a start ends that life: the next one may lose another.
        cell = next((each for each in fits if each.phase == "start"), fits[0])
        waiting.remove(cell)
        console.print(f"step {step}: {cell.name}")
        if struck.strike(cell, step) and cell.phase != "start":
            step = max(step, struck.cells[-1]["step"] or 0) + 1
    struck.finish()
    found = compare(struck.driver, peace)
    return [{**cell, **found} for cell in struck.cells]


def main() -> None:
    """Runs of some cells each, until the time is over or no cell is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25.0, help="no further run begins after so many")
    parser.add_argument("--seed", type=int, default=1, help="decides the order")
    parser.add_argument("--each", type=int, default=8, help="cells of one run")
    parser.add_argument("--only", default="", help="cells as kind/phase, separated by commas; also those that were run")
    args = parser.parse_args()
    result = RESULTS / "kills.json"
    known = json.loads(result.read_text())["cells"] if result.exists() else []
    everything = [Cell(kind, phase) for kind in KINDS for phase in PHASES]
    done = {Cell(cell["kind"], cell["phase"]) for cell in known}
    left = [cell for cell in everything if (cell.name in args.only.split(",") if args.only else cell not in done)]
    random.Random(args.seed).shuffle(left)
    end = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_tiny_model(folder / "model", hidden_size=64)
        make_arithmetic(folder / "data", num_train=64, num_eval=8, num_sft=64)
        peace = start(folder, "run.name=peace", *SETTING)
        code, _, error = peace.finish(LONGEST_S)
        if code:
            raise RuntimeError(error)
        number = 0
        while left and time.monotonic() < end:
            some, left, number = left[: args.each], left[args.each :], number + 1
            made = run_cells(folder, f"struck-{number}", some, peace)
            left += [cell for cell in some if cell not in {Cell(each["kind"], each["phase"]) for each in made}]
            again = {(each["kind"], each["phase"]) for each in made}
            known = [cell for cell in known if (cell["kind"], cell["phase"]) not in again] + made
            for each in made:
                console.print(each)
            # What was done is kept where the rest is not.
            write("kills", {"cells": known}, None)
            PAGE.write_text(render(known))


if __name__ == "__main__":
    main()
