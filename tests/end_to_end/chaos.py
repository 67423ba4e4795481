"""Kills and freezes processes of a run at random, so that it can be seen whether the run minds."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from tests.end_to_end.harness import Driver, is_server

VICTIMS: dict[str, Callable[[str], bool]] = {
    "server": is_server,
    "scheduler": lambda command: command.startswith("sglang::scheduler"),
    "router": lambda command: command.startswith("sglang::router"),
    "collector": lambda command: command.startswith("ray::CollectorActor"),
}
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
WHO = r"sglang server \d+|the router|collector(?: \d+)?"
EVENT = re.compile(
    rf"^(?P<time>[\d-]+ [\d:]+) \S+ \S+: (?P<who>{WHO}) (?P<what>left the pool|died|ended|is back)", re.MULTILINE
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


@dataclass(frozen=True)
class Event:
    """What the driver said of whom. at: seconds since the epoch, to a second."""

    at: float
    who: str
    back: bool


def events(driver: Driver) -> list[Event]:
    """Who was lost and who came back, in order."""
    log = (driver.folder / "logs" / "driver.log").read_text()
    return [
        Event(datetime.fromisoformat(found["time"]).timestamp(), found["who"], found["what"] == "is back")
        for found in EVENT.finditer(log)
    ]


def seconds_until_back(strikes: Sequence[Strike], seen: Sequence[Event]) -> list[float | None]:
    """Of each strike, from it until the driver said that whom it had hit is back.

    None where that was not seen: the run ended before, or a second strike hit whom the driver had given up already.
    """
    left, found = [event for event in seen if not event.back], []
    for strike in strikes:
        kind = "server" if strike.victim == "scheduler" else strike.victim
        hit = next((event for event in left if kind in event.who and event.at >= int(strike.at)), None)
        if hit is not None:
            left.remove(hit)
            times = [event.at for event in seen if event.back and event.who == hit.who and event.at >= hit.at]
            found.append(min(times) - strike.at if times else None)
        else:
            found.append(None)
    return found
