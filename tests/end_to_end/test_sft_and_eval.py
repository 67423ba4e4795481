"""`megarl sft` and `megarl eval` from the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.harness import RECIPE, pasted
from tests.support.fake_graders import FakeJudge, FakeRemote, in_thread

pytestmark = pytest.mark.slow

SFT_RECIPE = """
run: {{name: sft, dir: {folder}/runs}}
cluster: {{platform: cpu}}
model: {{path: {folder}/model, dtype: float32}}
data: {{train: {folder}/data/sft.jsonl, max_tokens: 128}}
actor: {{micro_batch_tokens: 512, optimizer: {{lr: 3.0e-3}}}}
train: {{steps: 6, batch_samples: 16, save_every: 1, keep_last: 9}}
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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that holds two checkpoints, and not three."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_sft_goes_on_after_a_full_disk_lowers_the_loss_and_its_export_can_be_evaluated(
    inputs: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is named, with the checkpoint that is whole; once there is room, the command that was printed goes on."""
    recipe = inputs / "sft.yaml"
    recipe.write_text(SFT_RECIPE.format(folder=inputs))
    words = ("sft", str(recipe), f"run.dir={small_disk}")
    done = megarl(*words)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"megarl: A disk is full ({small_disk}: " in done.stderr and "MB are free" in done.stderr
    checkpoints = small_disk / "sft" / "checkpoints"
    last = max(checkpoints.iterdir())
    assert "Make room there first" in done.stderr and f"The last good checkpoint is {last}, of step " in done.stderr
    assert [path for path in checkpoints.iterdir() if path.name.startswith(".")] == []
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    assert pasted(done.stderr) == [sys.executable, "-m", "megarl", *words, "--resume"]
    done = megarl(*words, "--resume")
    assert done.returncode == 0, done.stderr
    assert (checkpoints / "step_000006").is_dir()
    rows = [json.loads(line) for line in (small_disk / "sft" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["sft/loss"] < rows[0]["sft/loss"] - 0.5
    evaluate(inputs, small_disk / "sft" / "hf", monkeypatch)


def evaluate(inputs: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`megarl eval`, graded by a rule, a reward server and a judge; their key comes from the environment alone."""
    key = "secret-of-the-test"
    monkeypatch.setenv("GRADERS_KEY", key)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    recipe = inputs / "eval.yaml"
    recipe.write_text(re.sub(r"(?m)^reward: .*$", GRADERS, RECIPE.format(folder=inputs)))
    remote, judge = FakeRemote(score=lambda _: 0.25), FakeJudge(reply=lambda _: "Score: 8")
    with in_thread(remote, judge):
        servers = (f"reward.graders.far.url={remote.url}", f"reward.graders.style.url={judge.url}")
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
