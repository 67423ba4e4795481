"""`megarl rm`, `dpo` and `kto` from the command line, over two ranks: they learn, go on, and export what transformers loads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.end_to_end.harness import pasted
from tests.end_to_end.test_sft_and_eval import megarl

pytestmark = pytest.mark.slow

RECIPE = """
run: {{name: {command}, dir: {folder}/runs}}
cluster: {{platform: cpu, devices: 2}}
model: {{path: {folder}/model, dtype: float32}}
data: {{train: {folder}/pairs.jsonl, eval: {folder}/pairs.jsonl, max_tokens: 32}}
actor: {{micro_batch_tokens: 256, optimizer: {{lr: 3.0e-3}}}}
eval: {{every: 2}}
train: {{steps: 4, batch_samples: 8, save_every: 2}}
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that holds two checkpoints, and not three."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def write_pairs(folder: Path) -> None:
    """Which answer is right can be told from its first letter."""
    rows = [{"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": f"no {n}", "margin": 0.1} for n in range(16)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_labelled(folder: Path) -> None:
    """The sides of such pairs one by one, in the place of these."""
    rows = [
        {"prompt": f"{n}?", "completion": f"{word} {n}", "label": word == "yes"}
        for n in range(16)
        for word in ("yes", "no")
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def written(folder: Path, command: str, section: str) -> str:
    """The command's recipe."""
    recipe = folder / f"{command}.yaml"
    recipe.write_text(RECIPE.format(folder=folder, command=command) + section)
    return str(recipe)


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_reward_model_learns_goes_on_after_a_full_disk_and_is_a_classifier(inputs: Path, small_disk: Path) -> None:
    """The disk is named, with the checkpoint that is whole; once there is room, the command that was printed goes on."""
    write_pairs(inputs)
    recipe = written(inputs, "rm", "rm: {center_coef: 0.01}\n")
    # Context parallel: the two ranks hold parts of every sequence.
    words = ("rm", recipe, f"run.dir={small_disk}", "actor.parallel.cp=2", "train.save_every=1", "train.keep_last=9")
    done = megarl(*words)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"megarl: A disk is full ({small_disk}: " in done.stderr and "MB are free" in done.stderr
    run = small_disk / "rm"
    last = max((run / "checkpoints").iterdir())
    assert "Make room there first" in done.stderr and f"The last good checkpoint is {last}, of step " in done.stderr
    assert [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".")] == []
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    assert pasted(done.stderr) == [sys.executable, "-m", "megarl", *words, "--resume"]
    before = metrics(run)
    done = megarl(*words, "--resume")
    assert done.returncode == 0, done.stderr
    assert (run / "checkpoints" / "step_000004").is_dir()
    rows = metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    kept = int(last.name.removeprefix("step_")) + 1
    assert 1 < kept < 5 and rows[:kept] == before[:kept]
    held_out = {row["step"]: row["rm/eval_accuracy"] for row in rows if "rm/eval_accuracy" in row}
    assert list(held_out) == [0, 2, 4]
    assert held_out[0] == pytest.approx(0.5) and held_out[4] == pytest.approx(1.0)
    assert rows[-1]["rm/loss"] < rows[1]["rm/loss"] and rows[-1]["rm/grad_norm"] > 0
    model = AutoModelForSequenceClassification.from_pretrained(run / "hf")
    assert model.num_labels == 1 and model.score.weight.any()


def test_dpo_moves_the_policy_towards_the_chosen_answers(inputs: Path) -> None:
    write_pairs(inputs)
    # The reference has a layout of its own.
    done = megarl("dpo", written(inputs, "dpo", "dpo: {beta: 0.5}\nreference: {parallel: {tp: 2}}\n"))
    assert done.returncode == 0, done.stderr
    rows = metrics(inputs / "runs" / "dpo")
    held_out = {row["step"]: row["dpo/eval_margin"] for row in rows if "dpo/eval_margin" in row}
    assert list(held_out) == [0, 2, 4]
    assert abs(held_out[0]) < 1e-4 and held_out[4] > 0.5
    assert rows[-1]["dpo/accuracy"] == pytest.approx(1.0)
    assert rows[-1]["dpo/chosen_reward"] - rows[-1]["dpo/rejected_reward"] == pytest.approx(rows[-1]["dpo/margin"])
    assert AutoModelForCausalLM.from_pretrained(inputs / "runs" / "dpo" / "hf").lm_head.weight.any()


def test_kto_learns_from_labels(inputs: Path) -> None:
    """Context parallel, and a reference at a layout of its own: the KL is that of all rows, on both."""
    write_labelled(inputs)
    section = "kto: {beta: 0.5}\nreference: {parallel: {tp: 2}}\n"
    done = megarl("kto", written(inputs, "kto", section), "actor.parallel.cp=2")
    assert done.returncode == 0, done.stderr
    rows = metrics(inputs / "runs" / "kto")
    held_out = {row["step"]: row for row in rows if "kto/eval_loss" in row}
    assert list(held_out) == [0, 2, 4]
    assert held_out[0]["kto/eval_loss"] == pytest.approx(0.5, abs=1e-4) and held_out[0]["kto/eval_kl"] < 1e-4
    assert held_out[4]["kto/eval_accuracy"] == pytest.approx(1.0)
    assert held_out[4]["kto/eval_desirable_reward"] > 0 > held_out[4]["kto/eval_undesirable_reward"]
    assert AutoModelForCausalLM.from_pretrained(inputs / "runs" / "kto" / "hf").lm_head.weight.any()
