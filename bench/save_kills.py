"""`kill -9` at random moments of checkpoint saves. One command:

    python -m bench.save_kills [--kills 200] [--seed 1]

A small run trains and saves each step, by the engine, the recorder and the checkpoints of every run. It is killed in a save: in
each part of one as often as in each other, however short it is; half of the times exactly before an operation on files, half of
the times at a random time between two. Then it goes on from what `Checkpoints` finds, is killed again, and so on. Every time the
checkpoint has to be whole, and its weights those that were saved, to the bit; and at most one step may have to be done again, two
where files are written while the next step is trained on (`train.async_save`), which is a run of its own. In the end both runs
have to have had the weights of a run in peace at every step. What the kernel holds outlives a process: this does not show what a
machine loses that loses its power.
Writes bench/results/save_kills.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import select
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.support.killed_saves import CHECKPOINTS, KEEP, PARTS, VOCAB, Moment, Watch, live, lived
from bench.support.measure import write
from megarl.core.loading import without_collection
from megarl.core.platform import get_platform
from megarl.models.bootstrap import prepare_megatron
from megarl.training.run_checkpoints import Checkpoints
from tests.support.tiny import write_tiny_qwen

LONGEST_S = 60.0  # of a life that is killed
SAVES = 2  # in which of its saves a life may be killed, at most
CALIBRATING = KEEP + 3
SIDES = {"waited for": False, "beside training": True}

console = Console()


@dataclass(frozen=True)
class Life:
    """One process of a run. part: where it was when it ended, after so many operations. made: of its last save, in peace."""

    part: str
    operations: int
    made: list[tuple[str, float]]


@dataclass(frozen=True)
class Run:
    """A run in its folder, whose lives are copies of this process."""

    folder: Path
    model: Path
    async_save: bool

    def life(self, last: int, moment: Moment | None = None, delay_s: float = 0.0) -> Life:
        """One life until step `last`, or until it is killed `delay_s` after the moment. Raises RuntimeError where it fails."""
        self.folder.mkdir(exist_ok=True)
        context, seen = multiprocessing.get_context("fork"), RawArray("i", 3)
        reading, telling = os.pipe()
        made, sender = context.Pipe(duplex=False)
        process = context.Process(target=self._live, args=(last, moment, seen, telling, sender))
        process.start()
        os.close(telling)
        sender.close()
        try:
            if moment is not None and not moment.exactly and select.select([reading], [], [], LONGEST_S)[0]:
                if os.read(reading, 1):
                    time.sleep(delay_s)
                process.kill()
            process.join(None if moment is None else LONGEST_S)
        finally:
            process.kill()
            process.join()
            os.close(reading)
        if process.exitcode != (0 if moment is None else -9):
            raise RuntimeError(f"A life ended with {process.exitcode}:\n{(self.folder / 'log').read_text()}")
        operations = made.recv() if moment is None else []
        made.close()
        return Life(PARTS[seen[2]], seen[1], operations)

    def _live(self, last: int, moment: Moment | None, seen: Any, telling: int, sender: Any) -> None:
        """In the copy."""
        log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        watch = Watch(self.folder / CHECKPOINTS, seen, moment, telling)
        try:
            live(self.folder, self.model, last, self.async_save, watch)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        sender.send(watch.made)
        os._exit(0)  # what this process was copied from has its own end

    def found(self) -> int:
        """The step that a resume would go on from; 0 where no checkpoint was ever committed."""
        checkpoints = Checkpoints(self.folder / CHECKPOINTS, KEEP)
        return checkpoints.latest().step if any(checkpoints.folder.glob("step_*")) else 0

    def left_over(self) -> list[str]:
        """Folders beside the checkpoints that are kept."""
        kept = {each.folder.name for each in Checkpoints(self.folder / CHECKPOINTS, KEEP).committed()[-KEEP:]}
        return sorted(path.name for path in (self.folder / CHECKPOINTS).iterdir() if path.name not in kept)


def drawn(dice: random.Random, parts: tuple[str, ...], made: list[tuple[str, float]]) -> tuple[Moment, float]:
    """A moment of a save, and how long after it. made: of a save in peace. parts: those that have their turn."""
    part = dice.choice(parts)
    numbers = [number for number, (each, _) in enumerate(made) if each == part]
    save = dice.randint(1, SAVES)
    if not numbers:  # after the last operation: until the next save's first
        return Moment(save, len(made) - 1, False), dice.uniform(0, 0.1)
    number = dice.choice(numbers)
    until = made[number + 1][1] if number + 1 < len(made) else made[number][1]
    return Moment(save, number, dice.random() < 0.5), dice.uniform(0, until - made[number][1])


def killed(run: Run, kills: int, made: list[tuple[str, float]], dice: random.Random) -> list[dict[str, Any]]:
    """Kill so many lives, and look at what each left."""
    parts, done = (*dict.fromkeys(part for part, _ in made), "training"), []
    for number in range(kills):
        before = len(lived(run.folder))
        moment, delay_s = drawn(dice, parts, made)
        life = run.life(10**6, moment, delay_s)
        said = lived(run.folder)[before:]
        reached = max((each["step"] for each in said if "step" in each), default=said[0]["resumed"])
        found = run.found()
        done.append({"part": life.part, "operation": life.operations, "reached": reached, "found": found})
        if number % 20 == 19:
            console.print(f"{number + 1} kills: {done[-1]}")
    return done


def judged(run: Run, peace: Run, done: list[dict[str, Any]]) -> dict[str, Any]:
    """What became of a run, beside the one in peace."""
    right = {each["step"]: each["digest"] for each in lived(peace.folder) if "step" in each}
    right[0] = lived(peace.folder)[0]["digest"]
    said = lived(run.folder)
    wrong = [each for each in said if right[each.get("step", each.get("resumed"))] != each["digest"]]
    resumed = [each["resumed"] for each in said if "resumed" in each]
    repeated = [each["reached"] - each["found"] for each in done]
    return {
        "kills": len(done),
        "parts": dict(Counter(each["part"] for each in done)),
        "steps": max(right),
        # A life begins where the last one's end was seen to be, and nowhere else.
        "others_chosen": sum(one != each["found"] for one, each in zip(resumed[1:], done, strict=True)),
        "not_to_the_bit": len(wrong),
        "repeated": {str(steps): count for steps, count in sorted(Counter(repeated).items())},
        "repeated_most": max(repeated),
        "left_over": run.left_over(),
    }


def measure(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Both runs under fire, and the one in peace."""
    write_tiny_qwen(folder / "model", vocab_size=VOCAB)
    found: dict[str, Any] = {"seed": seed, "sides": {}}
    for number, (name, async_save) in enumerate(SIDES.items()):
        calm = Run(folder / f"calm-{number}", folder / "model", async_save)
        made, dice = calm.life(CALIBRATING).made, random.Random(seed + number)
        shutil.rmtree(calm.folder / CHECKPOINTS)
        run, began = Run(folder / f"run-{number}", folder / "model", async_save), time.perf_counter()
        done = killed(run, kills // len(SIDES), made, dice)
        seconds = time.perf_counter() - began
        last = max(each["reached"] for each in done) + 1
        run.life(last)
        shutil.rmtree(calm.folder)
        calm.life(last)
        found["sides"][name] = {**judged(run, calm, done), "operations": len(made), "seconds": seconds}
        console.print(name, found["sides"][name])
    return found


def is_good(result: dict[str, Any]) -> bool:
    """Whether nothing was lost that should not be."""
    sides = result["sides"]
    return all(
        not side["others_chosen"]
        and not side["not_to_the_bit"]
        and not side["left_over"]
        and side["repeated_most"] <= 1 + SIDES[name]
        for name, side in sides.items()
    )


def load() -> None:
    """What the lives share."""
    with without_collection():
        prepare_megatron(get_platform("cpu"))
        import torch

        torch.set_num_threads(1)  # a copy has no threads of its origin
        import megarl.training.checkpoint
        import megarl.training.engine  # noqa: F401


def main(kills: int, seed: int, out: Path | None = None) -> None:
    """Kill, judge and write save_kills.json."""
    with tempfile.TemporaryDirectory() as name:
        result = measure(Path(name), kills, seed)
    write("save_kills", result, out)
    if not is_good(result):
        sys.exit(f"Something was lost, chosen wrongly or left over: {result}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    load()
    main(args.kills, args.seed)
