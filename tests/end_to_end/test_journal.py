"""`kill -9` of a run, twice, and what it goes on with: on servers that never answer the same twice."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from megarl.rollout.journal import JOURNAL, steps_of
from tests.end_to_end.harness import Driver, start

pytestmark = pytest.mark.slow

SETTING = ("train.steps=4", "train.save_every=2", "train.keep_last=1")
SAME = re.compile(r"(actor|reward|rollout|data)/")


def killed_after(driver: Driver, step: int) -> dict[int, dict[str, Any]]:
    driver.wait_for_step(step)
    driver.process.send_signal(signal.SIGKILL)
    assert driver.finish(30)[0] == -signal.SIGKILL
    driver.assert_nothing_left()
    return trained(driver)


def trained(driver: Driver) -> dict[int, dict[str, Any]]:
    rows = {row["step"]: row for row in driver.metrics() if row["step"]}
    return {step: {name: row[name] for name in row if SAME.match(name)} for step, row in rows.items()}


def samples(driver: Driver, step: int) -> str:
    return (driver.folder / "samples" / f"step_{step:06d}.jsonl").read_text()


def test_a_killed_run_trains_on_what_it_had(inputs: Path) -> None:
    driver = start(inputs, "run.name=journaled", *SETTING)
    first = killed_after(driver, 1)
    assert not list(driver.folder.glob("checkpoints/step_*"))
    said = samples(driver, 1)
    driver = start(inputs, "run.name=journaled", *SETTING, "--continue")
    second = killed_after(driver, 3)
    assert second[1] == first[1] and samples(driver, 1) == said
    assert 3 in steps_of(driver.folder / JOURNAL)
    said = samples(driver, 3)

    code, _, error = start(inputs, "run.name=journaled", *SETTING, "actor.optimizer.lr=2e-3", "--resume").finish(60)
    assert code == 2
    assert "actor.optimizer.lr was 0.001 and is 0.002" in error and "--discard-journal" in error
    anew = inputs / "runs" / "anew"
    shutil.copytree(driver.folder, anew)

    driver = start(inputs, "run.name=journaled", *SETTING, "--resume")
    code, _, error = driver.finish()
    assert code == 0, error
    assert [row["step"] for row in driver.metrics()] == [0, 1, 2, 3, 4]
    assert trained(driver)[3] == second[3] and samples(driver, 3) == said
    assert steps_of(driver.folder / JOURNAL) == []  # the last checkpoint needs none of it
    driver.assert_nothing_left()

    other = start(inputs, "run.name=anew", *SETTING, "actor.optimizer.lr=2e-3", "--resume", "--discard-journal")
    code, _, error = other.finish()
    assert code == 0, error
    assert trained(other)[3] != second[3] and samples(other, 3) != said
    other.assert_nothing_left()
