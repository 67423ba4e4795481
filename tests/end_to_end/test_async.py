"""Runs that generate while they train: every token is of the version that it says, whatever dies meanwhile."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from datetime import date
from typing import Any

import pytest

from tests.end_to_end import chaos
from tests.end_to_end.harness import SLOWLY, Driver, assert_says_how_to_go_on, is_rank, kill, own_words, pasted

pytestmark = pytest.mark.slow

Launch = Callable[..., Driver]

# The weights stay as they are, and their versions count: what any of them said has to be what the trainer says.
STILL = ("actor.optimizer.lr=1.0e-12", "algorithm.kl_coef=0", "algorithm.correction={}")
SMALL = (*STILL, "rollout.max_response_tokens=32", "actor.micro_batch_tokens=1024")
IN_PLACE = ("rollout.max_staleness=1", "rollout.in_flight=in_place", "rollout.keep_kv=true")
TWO = ("rollout.servers=2", "rollout.collectors=2")
EVALUATED = ("eval.every=2", "eval.overlap=true")
# What other runs do not show: servers are killed and frozen in test_disk, and the router is killed in test_engines.
# Each pair has its day.
STRIKES = (
    (("scheduler", signal.SIGKILL), ("router", signal.SIGSTOP)),
    (("collector", signal.SIGKILL), ("collector", signal.SIGSTOP)),
)[date.today().toordinal() % 2]
SAME = 1e-4  # nats; other weights differ by far more


def sampled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of steps, each of which is right."""
    steps = [row for row in rows if row["step"]]
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    for row in steps:
        assert row["rollout/logprob_diff_max"] < SAME and row["rollout/failed"] == 0, row
        assert row["rollout/num_samples"] == 16 and row.get("rollout/staleness_max", 0) <= 1, row
    return steps


def samples(driver: Driver, step: int) -> set[str]:
    """Prompts of a step's samples, with the step that they were asked for: those that were written, of one collector."""
    lines = (driver.folder / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return {json.loads(line)["id"].rpartition("/")[0] for line in lines}


def test_samples_of_several_versions_and_a_resume_that_goes_on_with_what_was_under_way(launch: Launch) -> None:
    """The first run is ended by Ctrl-C; the one that goes on loses processes that come back, and then a rank, which ends it.

    It goes on with a server and a collector more.
    """
    # Few at a time, so that some are still being answered when a step ends.
    few = ("rollout.max_running_requests=2", "rollout.max_restarts=100", "cluster.max_recoveries=0")
    setting = (
        "run.name=beside",
        *SMALL,
        *IN_PLACE,
        *EVALUATED,
        *few,
        "train.save_every=3",
        "train.steps=1000",
        SLOWLY,
    )
    driver = launch(*setting)
    driver.wait_for_step(4)  # what was saved at step 3 is whole
    os.killpg(driver.process.pid, signal.SIGINT)  # as a terminal does: to all that it has started
    code, _, error = driver.finish(30)
    assert code == 130, error
    driver.assert_nothing_left()
    last = assert_says_how_to_go_on(driver, signal.SIGINT, error, setting)
    saved = json.loads((last / "state.json").read_text())
    waiting = saved["data"]["waiting"]
    assert len(waiting) == 8, "groups of the next two steps are under way while one is saved"
    first = int(last.name[5:]) + 1
    again = launch(*setting, *TWO, "--resume")
    again.wait_for_step(first + 2)
    # What was under way is asked for anew, with the seeds of the step that it was meant for, and no other prompt is.
    asked = {f"{step}/train.jsonl:{row + 1}" for row, step, _ in waiting}
    meant = {name.partition("/")[0] for name in asked}
    trained = {name for name in samples(again, first) | samples(again, first + 1) if name.partition("/")[0] in meant}
    assert trained and trained <= asked, (trained, asked)
    kills_and_freezes_cost_nothing_but_time_and_a_killed_rank_ends_the_run(again, first + 2)
    steps = sampled(again.metrics())
    assert max(row["rollout/versions_per_sample"] for row in steps) > 1
    assert max(row["rollout/staleness_max"] for row in steps) == 1
    evaluated = {row["step"] for row in again.metrics() if "eval/accuracy" in row}
    assert evaluated >= {0, 2, 4}


def back(driver: Driver) -> set[str]:
    """Who came back."""
    return {event.who for event in chaos.events(driver) if event.back}


def kills_and_freezes_cost_nothing_but_time_and_a_killed_rank_ends_the_run(driver: Driver, step: int) -> None:
    """From this step on, one a step. All random, and many more: bench/chaos.py."""
    plans = [
        chaos.Plan(step + index, (victim,), number, which=0.0)  # the oldest: not the one that has just come back
        for index, (victim, number) in enumerate(STRIKES)
    ]
    strikes = chaos.strike_all(driver, plans)
    last = driver.metrics()[-1]["step"]
    # A server and the router, or both collectors.
    driver.wait_for(lambda row: row["step"] > last + 1 and len(back(driver)) == len(STRIKES))
    kill(driver.pids(is_rank))
    code, _, error = driver.finish(60)
    assert code == 1, (strikes, error)
    assert "rank 0 (pid " in error and "died during" in error
    assert "Traceback" not in own_words(error) and "UserWarning" not in error
    assert re.search(r"The last good checkpoint is \S+/beside/checkpoints/step_0000\d\d, of step \d+\.", error)
    assert pasted(error)[-1] == "--resume"
    seen = chaos.events(driver)
    for strike, seconds in zip(strikes, chaos.seconds_until_back(strikes, seen), strict=True):
        print(strike, "" if seconds is None else f": back after {seconds:.0f} s")
    driver.assert_nothing_left()
