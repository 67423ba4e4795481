from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.reward_model import by_style, score
from megarl.data.pairs import load_pairs
from megarl.recipe.supervised import PairData
from tools.make_tiny_model import make_tiny_model


def test_accuracy_by_style_by_hand() -> None:
    rows = [{"chosen": "a\n#### 1", "rejected": "#### 2"}, {"chosen": "#### 1", "rejected": "#### 2"}] * 2
    found = by_style(rows, [(1.0, 0.0), (0.0, 1.0), (2.0, 1.0), (3.0, 3.0)])
    assert found == {
        "all": {"accuracy": 0.625, "pairs": 4},
        "worked over direct": {"accuracy": 1.0, "pairs": 2},
        "direct over direct": {"accuracy": 0.25, "pairs": 2},
    }


def test_what_transformers_scores_are_the_tokens_that_are_trained_on(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    make_tiny_model(tmp_path / "model", hidden_size=64)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1, dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    row = {"prompt": "What is 1 + 2?", "chosen": "#### 3", "rejected": "#### 4"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    (pair,) = load_pairs(tmp_path / "pairs.jsonl", tmp_path / "model", PairData(train=tmp_path / "pairs.jsonl")).rows
    with torch.no_grad():
        expected = [model(torch.tensor(side.token_ids)[None]).logits.item() for side in (pair.chosen, pair.rejected)]
    assert list(score(tmp_path / "model", [row])[0]) == pytest.approx(expected, abs=1e-6)
