"""`megarl sft` and `megarl eval` from the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from megarl.core import janitor
from tests.end_to_end.harness import RECIPE, Driver
from tests.support.fake_graders import FakeJudge, FakeRemote, in_thread
from tests.support.further import add_further, same_bytes, stored
from tests.support.processes import heed_interrupts
from tests.support.terminal import BELOW_A_SHELL, Terminal

pytestmark = pytest.mark.slow

RAYS = ("gcs_server", "raylet")
SFT_RECIPE = """
run: {{name: sft, dir: {folder}/runs}}
cluster: {{platform: cpu}}
model: {{path: {folder}/model, dtype: float32}}
data: {{train: {folder}/data/sft.jsonl, max_tokens: 128}}
actor: {{micro_batch_tokens: 512, optimizer: {{lr: 3.0e-3}}}}
train: {{steps: 6, batch_samples: 16}}
report: {{tensorboard: false}}
"""

GRADERS = """
reward:
  graders:
    right: {kind: rule, fn: "tests.end_to_end.rewards:share_of_digits"}
    far: {kind: remote, key_env: GRADERS_KEY, weight: 0.5}
    style: {kind: judge, model: m, key_env: GRADERS_KEY, weight: -0.25}
"""


def megarl(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megarl", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_sft_lowers_the_loss_and_its_export_can_be_evaluated(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = inputs / "sft.yaml"
    recipe.write_text(SFT_RECIPE.format(folder=inputs))
    done = megarl("sft", str(recipe))
    assert done.returncode == 0, done.stderr
    run = inputs / "runs" / "sft"
    assert (run / "checkpoints" / "step_000006").is_dir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["sft/loss"] < rows[0]["sft/loss"] - 0.5
    evaluate(inputs, run / "hf", monkeypatch)


def test_what_a_run_does_not_train_comes_out_as_it_went_in(inputs: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(inputs / "model", tmp_path / "model"))
    names = add_further(model, "qwen3")
    before = stored(model)
    recipe = tmp_path / "sft.yaml"
    recipe.write_text(SFT_RECIPE.format(folder=inputs))
    words = ("run.name=carried", f"model.path={model}", "train.steps=2", "train.save_every=2")
    done = megarl("sft", str(recipe), *words, "cluster.devices=2", "actor.parallel.tp=2")
    assert done.returncode == 0, done.stderr
    run = inputs / "runs" / "carried"
    after = stored(run / "hf")
    assert after.keys() == before.keys()
    assert same_bytes(*({name: each[name] for name in names} for each in (after, before)))
    kept = stored(run / "checkpoints" / "step_000002" / "actor" / "hf")
    assert same_bytes(kept, {name: before[name] for name in names})


def evaluate(inputs: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`megarl eval`, graded by a rule, a reward server and a judge; their key comes from the environment alone."""
    key = "secret-of-the-test"
    monkeypatch.setenv("GRADERS_KEY", key)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    recipe = inputs / "eval.yaml"
    recipe.write_text(re.sub(r"(?m)^reward: .*$", GRADERS, RECIPE.format(folder=inputs)))
    remote, judge = FakeRemote(score=lambda _: 0.25), FakeJudge(reply=lambda _: "Score: 8")
    with in_thread(remote, judge):
        servers = [f"reward.graders.far.url={remote.url}", f"reward.graders.style.url={judge.url}"]
        # A teacher that is nowhere: nobody asks it about held-out answers.
        servers += ["algorithm.policy_loss=distill", "teacher.servers={urls: ['http://127.0.0.1:1'], key_env: NO_KEY}"]
        done = megarl("eval", str(recipe), "run.name=evaluated", f"model.path={model}", "eval.grader=style", *servers)
    assert done.returncode == 0, done.stderr
    assert "8 answers to 8 prompts" in done.stdout
    folder = inputs / "runs" / "evaluated-eval"
    figures = json.loads((folder / "eval.json").read_text())
    assert figures["eval/accuracy"] == 1.0 and figures["eval/response_len_mean"] > 0
    [samples] = folder.rglob("eval_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().strip().split("\n")]
    assert len(rows) == 8
    for row in rows:
        assert row["parts"]["far"] == 0.25 and row["parts"]["style"] == 0.8
        assert row["reward"] == pytest.approx(row["parts"]["right"] + 0.5 * 0.25 - 0.25 * 0.8)
    assert set(remote.keys) == set(judge.keys) == {f"Bearer {key}"}
    texts = [
        path.read_text(errors="replace") for path in inputs.rglob("*.*") if path.suffix in (".log", ".json", ".jsonl")
    ]
    assert not any(key in text for text in (done.stdout, done.stderr, *texts))


def holds_back_hangups(process: psutil.Process) -> bool:
    status = Path(f"/proc/{process.pid}/status").read_text()
    blocked = next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:"))
    return bool(int(blocked, 16) >> (signal.SIGHUP - 1) & 1)


def test_a_run_whose_terminal_is_closed_is_ended_in_order(inputs: Path, tmp_path: Path) -> None:
    """All of the terminal's foreground get the signal, Ray's own processes too."""
    recipe, code, errors = inputs / "closed.yaml", tmp_path / "code", tmp_path / "errors"
    recipe.write_text(SFT_RECIPE.format(folder=inputs))
    temp = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # the paths of Ray's sockets have to stay short
    command = [*BELOW_A_SHELL, str(code), sys.executable, "-m", "megarl", "sft", str(recipe)]
    settings = ("run.name=closed", "train.steps=1000", "train.save_every=2")
    segments = {path.name for path in janitor.SHARED_MEMORY.iterdir()}
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temp), "TERM": "xterm"}
    with (
        errors.open("wb") as file,
        Terminal([*command, *settings], stderr=file, env=env, preexec_fn=heed_interrupts) as terminal,
    ):
        driver = Driver(terminal.process, inputs / "runs" / "closed", segments, temp)  # type: ignore[arg-type]
        terminal.read_until(lambda _: any(row["step"] >= 4 for row in driver.metrics()), 300.0)
        rays = [each for each in psutil.Process(terminal.process.pid).children(recursive=True) if each.name() in RAYS]
        assert len(rays) == len(RAYS) and all(map(holds_back_hangups, rays)), (
            "without them nobody hears that it is to end"
        )
        terminal.close()
        assert terminal.process.wait(10) == -signal.SIGHUP
        end = time.monotonic() + 60
        while not code.exists() or not code.read_text():
            assert time.monotonic() < end, driver.where()
            time.sleep(0.1)
    said, log = errors.read_text(), (driver.folder / "logs" / "driver.log").read_text()
    assert code.read_text() == "129\n", said
    last = max((driver.folder / "checkpoints").glob("step_*"))
    for each in (said, log):
        assert "interrupted by SIGHUP" in each and f"The last good checkpoint is {last}" in each
        assert "Traceback" not in each and "died" not in each, each
    driver.assert_nothing_left()
    temp.rmdir()
