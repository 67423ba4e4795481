"""`megarl rm` and `megarl dpo` from the command line, over two ranks: they learn, resume, and export what transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

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


def write_pairs(folder: Path) -> None:
    """Which answer is right can be told from its first letter."""
    rows = [{"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": f"no {n}", "margin": 0.1} for n in range(16)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(folder: Path, command: str, section: str, *words: str) -> list[dict[str, Any]]:
    """Run the command; the rows of its metrics."""
    recipe = folder / f"{command}.yaml"
    recipe.write_text(RECIPE.format(folder=folder, command=command) + section)
    done = megarl(command, str(recipe), *words)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "runs" / command / "metrics.jsonl").read_text().splitlines()]


def test_a_reward_model_learns_resumes_and_is_a_classifier(inputs: Path) -> None:
    write_pairs(inputs)
    # Context parallel: the two ranks hold parts of every sequence.
    rows = run(inputs, "rm", "rm: {center_coef: 0.01}\n", "actor.parallel.cp=2")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    held_out = {row["step"]: row["rm/eval_accuracy"] for row in rows if "rm/eval_accuracy" in row}
    assert list(held_out) == [0, 2, 4]
    assert held_out[0] == pytest.approx(0.5) and held_out[4] == pytest.approx(1.0)
    assert rows[-1]["rm/loss"] < rows[1]["rm/loss"] and rows[-1]["rm/grad_norm"] > 0
    rows = run(inputs, "rm", "rm: {center_coef: 0.01}\n", "--resume", "train.steps=5")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    model = AutoModelForSequenceClassification.from_pretrained(inputs / "runs" / "rm" / "hf")
    assert model.num_labels == 1 and model.score.weight.any()


def test_dpo_moves_the_policy_towards_the_chosen_answers(inputs: Path) -> None:
    write_pairs(inputs)
    # The reference has a layout of its own.
    rows = run(inputs, "dpo", "dpo: {beta: 0.5}\nreference: {parallel: {tp: 2}}\n")
    held_out = {row["step"]: row["dpo/eval_margin"] for row in rows if "dpo/eval_margin" in row}
    assert list(held_out) == [0, 2, 4]
    assert abs(held_out[0]) < 1e-4 and held_out[4] > 0.5
    assert rows[-1]["dpo/accuracy"] == pytest.approx(1.0)
    assert rows[-1]["dpo/chosen_reward"] - rows[-1]["dpo/rejected_reward"] == pytest.approx(rows[-1]["dpo/margin"])
    assert AutoModelForCausalLM.from_pretrained(inputs / "runs" / "dpo" / "hf").lm_head.weight.any()
