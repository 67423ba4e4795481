"""What the feeder says of a step's rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megarl.cluster import feeder
from megarl.cluster.process import ProcessFacts
from megarl.data.pairs import Pair
from megarl.data.row_set import RowSet
from megarl.data.sft import Demonstration
from megarl.models.flops import forward_flops, train_flops
from megarl.recipe.supervised import DpoRecipe, RmRecipe
from tests.models.test_flops import DENSE


def text(length: int) -> Demonstration:
    return Demonstration("rows:1", np.arange(length, dtype=np.int32), np.ones(length, np.uint8))


@pytest.mark.parametrize(("kind", "scores"), [("rm", True), ("dpo", False)])
def test_a_reward_model_gives_a_score_instead_of_a_vocabulary(
    kind: str, scores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeder, "configure_process", lambda spec: ProcessFacts(1, "host"))
    monkeypatch.setattr(feeder, "load_model_config", lambda path: DENSE)
    monkeypatch.setattr(feeder, "load_supervised", lambda *given: RowSet((Pair(text(3), text(5), 0.0),), 0))
    sections = {"data": {"train": "rows.jsonl"}, "train": {"steps": 1, "batch_samples": 1}, kind: {}}
    recipe = {"rm": RmRecipe, "dpo": DpoRecipe}[kind].model_validate({"model": {"path": "m"}, **sections})
    info: Any = feeder.FeederActor(None, recipe, 1).take(1)[0]  # type: ignore[arg-type]
    vocabulary = 3 * forward_flops(DENSE, [3, 5]).logits
    left_out = vocabulary * (1 - 1 / DENSE.vocab_size) if scores else 0.0
    assert info.metrics["perf/train_flops"] == pytest.approx(train_flops(DENSE, [3, 5]) - left_out)
