"""`megarl train` from the command line, on two tensor-parallel ranks: what a run leaves, and how it goes on.

It goes on under one of the kills of docs/kills.md, another each day: `kill -9` of any process in any phase changes nothing.
"""

from __future__ import annotations

import json
import random
import re
from datetime import date
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.kills import EVERY, Cell, strike_all
from bench.support.killed_runs import KINDS, PHASES, Struck, graded
from tests.end_to_end.harness import Driver, start

pytestmark = pytest.mark.slow

GRADED = f"reward.fn=bench.support.killed_runs:{graded.__name__}"
TWO = ("cluster.devices=2", "actor.parallel.tp=2", "rollout.deterministic=true", GRADED, f"eval.every={EVERY}")
NAME, SETTING = "trained", ("report.wandb={}", f"train.save_every={EVERY}", *TWO)
FIRST_STEPS, STEPS = 1, 7  # so many that a kill that did not come about leaves steps for another
TRIES = 2  # kills of a day: a phase may be over before the process was found in it
SAMPLED = re.compile(r"(actor|critic|reward|rollout|eval|data)/")
COUNTS_OF_DEATHS = {"rollout/server_restarts", "rollout/groups_lost"}


@pytest.fixture(scope="module")
def trained(inputs: Path) -> Driver:
    driver = start(inputs, f"run.name={NAME}", *SETTING, "train.async_save=true", f"train.steps={FIRST_STEPS}")
    code, out, error = driver.finish()
    assert code == 0, error
    assert "weights" in out and "curve" in out
    driver.assert_nothing_left()
    return driver


def test_every_step_is_recorded_and_proven(trained: Driver) -> None:
    rows = trained.metrics()
    assert [row["step"] for row in rows] == list(range(FIRST_STEPS + 1))
    assert {"eval/accuracy", "sync/probe_diff_max"} <= set(rows[0]) and "eval/accuracy" in rows[-1]
    for version, row in enumerate(rows, start=1):
        assert row["sync/weight_version"] == version
        assert row["sync/probe_diff_max"] < 1e-4
    for row in rows[1:]:
        assert row["rollout/logprob_diff_max"] < 1e-4
        assert row["rollout/num_samples"] == 16
        assert row["actor/grad_norm"] > 0


def test_the_run_folder_holds_what_it_promises(trained: Driver) -> None:
    names = {path.name for path in trained.folder.iterdir()}
    wanted = {
        "recipe.yaml",
        "provenance.json",
        "metrics.jsonl",
        "curve.png",
        "hf",
        "logs",
        "samples",
        "tensorboard",
        "wandb",
    }
    assert wanted | {"checkpoints"} <= names
    assert (trained.folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    sample = json.loads((trained.folder / "samples" / "step_000001.jsonl").read_text().split("\n")[0])
    assert {"prompt", "response", "reward", "answer"} <= set(sample)
    model = AutoModelForCausalLM.from_pretrained(trained.folder / "hf")
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    AutoTokenizer.from_pretrained(trained.folder / "hf")
    log = (trained.folder / "logs" / "driver.log").read_text()
    assert "weights go to the servers by shared_memory: the model's first copy and all servers are on " in log


def test_no_secret_is_written(trained: Driver) -> None:
    # The servers' key and Ray's token are the only texts of 64 hexadecimal digits in a run.
    files = [
        path for path in trained.folder.rglob("*") if path.suffix in (".log", ".json", ".jsonl", ".yaml", ".stack")
    ]
    assert any(path.name == "sglang_server_0.log" and path.stat().st_size for path in files)
    assert [str(path) for path in files if re.search(r"\b[0-9a-f]{64}\b", path.read_text(errors="replace"))] == []


@pytest.mark.timeout(1500)
def test_a_run_that_exists_is_not_overwritten_and_is_resumed_whatever_dies_then(trained: Driver, inputs: Path) -> None:
    code, _, error = start(inputs, f"run.name={NAME}", *SETTING).finish(60)
    assert code == 2 and "--resume" in error
    before = trained.metrics()
    everything = [Cell(kind, phase) for kind in KINDS for phase in PHASES]
    chosen = random.Random(date.today().toordinal()).sample(everything, TRIES)
    setting = (*SETTING, f"train.steps={STEPS}", "rollout.max_restarts=99")
    struck = Struck.begin(inputs, NAME, setting, "--resume")
    try:
        missed = strike_all(struck, chosen[:1], FIRST_STEPS + 1, STEPS)
        if missed:
            missed = strike_all(struck, chosen[1:], struck.driver.metrics()[-1]["step"] + 1, STEPS)
        struck.finish()
    finally:
        struck.driver.end()
    assert len(struck.cells) == 1, (chosen, missed)
    rows = struck.driver.metrics()
    assert rows[: len(before)] == before
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    # A step that was learned from the journal sends no weights.
    versions = [row["sync/weight_version"] for row in rows if "sync/weight_version" in row]
    assert versions == sorted(set(versions)), "weight versions only go up"
    # 4 of 64 prompts a step: the cursor went on where it was.
    assert rows[4]["data/epoch"] == pytest.approx(16 / 64)
    names = sorted(path.name for path in (struck.driver.folder / "checkpoints").iterdir())
    assert names == [f"step_{step:06d}" for step in (STEPS - 1, STEPS)]


def test_the_same_run_is_the_same_to_the_bit(trained: Driver, inputs: Path) -> None:
    """Against one that was resumed and lost processes (the test before), on other servers, with other requests at once."""
    beside = ("rollout.servers=2", "rollout.concurrency=5", "train.save_every=null", f"train.steps={STEPS}")
    again = start(inputs, "run.name=again", *TWO, *beside)
    code, _, error = again.finish()
    assert code == 0, error

    def samples(driver: Driver, step: int) -> str:
        # All 16 of a step, in the order of their ids.
        return (driver.folder / "samples" / f"step_{step:06d}.jsonl").read_text()

    steps = range(1, STEPS + 1)
    assert [samples(again, step) for step in steps] == [samples(trained, step) for step in steps]
    for mine, theirs in zip(again.metrics(), trained.metrics(), strict=True):
        sampled = [name for name in set(mine) & set(theirs) - COUNTS_OF_DEATHS if SAMPLED.match(name)]
        assert len(sampled) >= 20 or mine["step"] == 0
        assert {name: mine[name] for name in sampled} == {name: theirs[name] for name in sampled}
    weights = [(driver.folder / "hf" / "model.safetensors").read_bytes() for driver in (trained, again)]
    assert weights[0] == weights[1]
