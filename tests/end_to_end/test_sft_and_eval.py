"""`megarl sft` and `megarl eval` from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.harness import RECIPE

pytestmark = pytest.mark.slow

SFT_RECIPE = """
run: {{name: sft, dir: {folder}/runs}}
cluster: {{platform: cpu, devices: 2}}
model: {{path: {folder}/model, dtype: float32}}
data: {{train: {folder}/data/sft.jsonl, max_tokens: 128}}
actor: {{micro_batch_tokens: 512, optimizer: {{lr: 3.0e-3}}}}
train: {{steps: 6, batch_samples: 16, save_every: 3}}
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


def test_sft_lowers_the_loss_and_its_export_can_be_evaluated(inputs: Path) -> None:
    recipe = inputs / "sft.yaml"
    recipe.write_text(SFT_RECIPE.format(folder=inputs))
    done = megarl("sft", str(recipe))
    assert done.returncode == 0, done.stderr
    folder = inputs / "runs" / "sft"
    losses = [json.loads(line)["sft/loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.5
    resumed = megarl("sft", str(recipe), "train.steps=8", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 8

    (inputs / "eval.yaml").write_text(RECIPE.format(folder=inputs))
    done = megarl("eval", str(inputs / "eval.yaml"), "run.name=evaluated", f"model.path={folder / 'hf'}")
    assert done.returncode == 0, done.stderr
    assert "8 answers to 8 prompts" in done.stdout
    figures = json.loads((inputs / "runs" / "evaluated-eval" / "eval.json").read_text())
    assert 0 <= figures["eval/accuracy"] <= 1 and figures["eval/response_len_mean"] > 0
