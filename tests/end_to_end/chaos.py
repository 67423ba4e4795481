"""Kills and freezes processes of a run at random, so that it can be seen whether the run minds."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from tests.end_to_end.harness import Driver, is_server

VICTIMS: dict[str, Callable[[str], bool]] = {
    "server": is_server,
    "scheduler": lambda command: command.startswith("sglang::scheduler"),
    "router": lambda command: "megarl.serving.sglang_router" in command,
    "collector": lambda command: command.startswith("ray::CollectorActor"),
}
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
BACK = re.compile(
    r"^(?P<time>[\d-]+ [\d:]+) \S+ \S+: (?P<who>sglang server \d+|the router|collector(?: \d+)?) is back", re.MULTILINE
)


@dataclass(frozen=True)
class Strike:
    """What was done to which process, while this step was the last that had ended."""

    step: int
    victim: str
    signal: str
    pid: int
    at: float  # seconds since the epoch

    def __str__(self) -> str:
        return f"step {self.step}: {self.signal} to a {self.victim} (pid {self.pid})"


@dataclass(frozen=True)
class Plan:
    """Which step is struck how; victims in the order of wish: the first that is there is taken."""

    step: int
    victims: tuple[str, ...]
    number: signal.Signals
    which: float  # among those of its kind, from 0 to 1


def plans(seed: int, count: int, first: int, last: int) -> list[Plan]:
    """So many strikes at different steps from first to last, whenever these have ended."""
    dice = random.Random(seed)
    steps = sorted(dice.sample(range(first, last + 1), count))
    # Every victim and every signal has its turn; the order is chance.
    pairs = [(victim, number) for victim in VICTIMS for number in SIGNALS]
    drawn = [pair for _ in range(-(-count // len(pairs))) for pair in dice.sample(pairs, len(pairs))]
    found = []
    for step, (victim, number) in zip(steps, drawn, strict=False):
        others = [each for each in VICTIMS if each != victim]
        dice.shuffle(others)
        found.append(Plan(step, (victim, *others), number, dice.random()))
    return found


def strike(driver: Driver, plan: Plan) -> Strike:
    """Wait for the step, then do it."""
    driver.wait_for_step(plan.step)
    for victim in plan.victims:
        pids = sorted(driver.pids(VICTIMS[victim]))
        if pids:
            pid = pids[int(plan.which * len(pids))]
            os.kill(pid, plan.number)
            return Strike(plan.step, victim, plan.number.name, pid, time.time())
    raise AssertionError("nothing of the run is there to be struck")


def strike_all(driver: Driver, all_plans: list[Plan], told: Callable[[str], None] = print) -> list[Strike]:
    """One after the other, as the run goes on."""
    done = []
    for plan in all_plans:
        done.append(strike(driver, plan))
        told(str(done[-1]))
    return done


def returns(driver: Driver) -> list[tuple[float, str]]:
    """When the driver said of whom that it is back, in order: seconds since the epoch, to a second."""
    log = (driver.folder / "logs" / "driver.log").read_text()
    return [(datetime.fromisoformat(found["time"]).timestamp(), found["who"]) for found in BACK.finditer(log)]


def back_after(struck: Strike, came: list[tuple[float, str]]) -> float | None:
    """Seconds from a strike until the first of its kind was back; None where the run ended before."""
    kind = "server" if struck.victim == "scheduler" else struck.victim
    times = [at - struck.at for at, who in came if kind in who and at >= int(struck.at) + 1]
    return min(times, default=None)
