"""`kill -9` of a run: of its driver, then of what nobody starts again. Its servers never answer the same twice.

Its weights go through files, which it leaves nowhere. Then all of it, replayed. Kinds and phases beyond these: bench/kills.py.
"""

from __future__ import annotations

import filecmp
import re
import signal
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from megarl.rollout.journal import JOURNAL, steps_of
from tests.end_to_end.harness import Driver, is_coordinator, is_rank, is_raylet, kill, start

pytestmark = pytest.mark.slow

KEPT = ("train.save_every=2", "train.keep_last=1", "train.journal_keep=all", "sync.transport=disk")
SETTING = ("run.name=journaled", "train.steps=4", *KEPT)
SAME = re.compile(r"(actor|reward|rollout|data)/")
VICTIMS = (is_rank, is_coordinator, is_raylet)
SENT = re.compile(r"without (\d+) weight syncs and (\d+) evaluations; weight version (\d+) is sent now")


def killed_after(driver: Driver, step: int) -> dict[int, dict[str, Any]]:
    driver.wait_for_step(step)
    [folder] = driver.folder.glob("weights-*")
    driver.process.send_signal(signal.SIGKILL)
    assert driver.finish(30)[0] == -signal.SIGKILL
    driver.assert_nothing_left(folder)
    return trained(driver)


def trained(driver: Driver) -> dict[int, dict[str, Any]]:
    rows = {row["step"]: row for row in driver.metrics() if row["step"]}
    return {step: {name: row[name] for name in row if SAME.match(name)} for step, row in rows.items()}


def synced(driver: Driver) -> list[int]:
    """Steps that ended with weights on their way to the servers; 0 is the start."""
    return [row["step"] for row in driver.metrics() if "sync/bytes" in row]


def sent(driver: Driver) -> list[list[int]]:
    """Weight syncs and evaluations that were left out, and the version that was sent then: of each life."""
    found = SENT.findall((driver.folder / "logs" / "driver.log").read_text())
    return [[int(number) for number in each] for each in found]


def samples(driver: Driver, step: int) -> str:
    return (driver.folder / "samples" / f"step_{step:06d}.jsonl").read_text()


def test_a_killed_run_trains_on_what_it_had(inputs: Path) -> None:
    driver = start(inputs, *SETTING)
    first = killed_after(driver, 1)
    assert not list(driver.folder.glob("checkpoints/step_*"))
    said, before = samples(driver, 1), driver.metrics()[0]
    assert synced(driver) == [0, 1]

    driver = start(inputs, *SETTING, "--continue")
    driver.wait_for_step(3)
    victim = VICTIMS[date.today().toordinal() % len(VICTIMS)]  # each has its day
    kill(driver.pids(victim))
    second, said_last = trained(driver), samples(driver, 3)
    code, _, error = driver.finish()
    assert code == 0, (victim, error)
    assert "recovery 1: the run goes on from its last checkpoint and journal. " in error, victim
    log = (driver.folder / "logs" / "driver.log").read_text()
    assert ("1 of 1 servers are kept, with the router" in log) == (victim is not is_raylet), victim
    assert second[1] == first[1] and samples(driver, 1) == said
    assert driver.metrics()[0]["eval/accuracy"] == before["eval/accuracy"]
    # The first life may have begun step 2 as well.
    syncs, evaluations, version = sent(driver)[0]
    assert version == 1 + syncs >= 2 and evaluations == 1
    assert [row["step"] for row in driver.metrics()] == [0, 1, 2, 3, 4]
    assert [row["perf/recoveries"] for row in driver.metrics()] == [0, 0, 0, 1, 1]
    assert trained(driver)[3] == second[3] and samples(driver, 3) == said_last
    syncs, evaluations, version = sent(driver)[-1]
    assert version == 3 + syncs >= 4 and evaluations == 0
    assert steps_of(driver.folder / JOURNAL) == [1, 2, 3, 4]
    driver.assert_nothing_left()

    replayed(driver)


def replayed(run: Driver) -> None:
    """All steps of a run that was killed twice, from the base model and without servers."""
    inputs = run.folder.parents[1]
    code, out, error = start(inputs, run=run.folder, command="replay").finish()
    assert code == 0, error
    assert "in the 4 steps are the run's, to the bit (steps 1 to 4)." in out
    assert filecmp.cmp(
        run.folder / "hf" / "model.safetensors", run.folder / "replay-1" / "hf" / "model.safetensors", False
    )
