"""What the feeder says of a step's rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.cluster import feeder
from megarl.cluster.process import ProcessFacts
from megarl.core.types import Image
from megarl.data.pack import assemble
from megarl.data.pairs import Pair
from megarl.data.row_set import RowSet
from megarl.data.sft import Demonstration
from megarl.data.unpaired import Unpaired
from megarl.models.flops import forward_flops, train_flops
from megarl.recipe.supervised import DpoRecipe, KtoRecipe, RmRecipe, SftRecipe
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


def test_labelled_answers_come_with_the_same_prompts_before_other_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(prompt: int, answer: int, *, desirable: bool) -> Unpaired:
        ids, mask = np.array([prompt, prompt, answer], np.int32), np.array([0, 0, 1], np.uint8)
        return Unpaired(Demonstration("rows:1", ids, mask), desirable)

    rows = (row(1, 11, desirable=True), row(2, 12, desirable=False), row(3, 13, desirable=True))
    monkeypatch.setattr(feeder, "configure_process", lambda spec: ProcessFacts(1, "host"))
    monkeypatch.setattr(feeder, "load_model_config", lambda path: DENSE)
    monkeypatch.setattr(feeder, "load_supervised", lambda *given: RowSet(rows, 0))
    sections = {"data": {"train": "rows.jsonl", "shuffle": False}, "train": {"steps": 1, "batch_samples": 3}, "kto": {}}
    recipe = KtoRecipe.model_validate({"model": {"path": "m"}, **sections})
    given: Any = feeder.FeederActor(None, recipe, 1).take(1)  # type: ignore[arg-type]
    info, *parts = given
    plans, blocks = parts[::2], parts[1::2]
    shards = [assemble(plan, [block]) for plan, block in zip(plans, blocks, strict=True)]
    found = [shard.mini_batches[0].micro_batches[0] for shard in shards]
    of = [sorted(zip(each.tokens.reshape(3, 3).tolist(), each.desirable.tolist(), strict=True)) for each in found]
    assert of[0] == [([1, 1, 11], 1.0), ([2, 2, 12], 0.0), ([3, 3, 13], 1.0)]
    assert of[1] == [([1, 1, 12], 1.0), ([2, 2, 13], 0.0), ([3, 3, 11], 1.0)]
    for each in found:
        assert each.weights == pytest.approx(np.where(np.arange(9) % 3 == 1, 1 / 3, 0))
    assert info.num_samples == 3


@pytest.mark.parametrize("kind", [SftRecipe, DpoRecipe, KtoRecipe])
def test_a_step_says_where_its_images_are_and_reads_none(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both answers of a pair have those of their prompt, and so have KTO's prompts before other answers."""
    rows = [
        replace(text(3), id=f"rows:{number}", images=(Image(Path(f"/gone/{number}.png"), 4, 4),)) for number in (1, 2)
    ]
    given: Any = {
        SftRecipe: ("sft", tuple(rows)),
        DpoRecipe: ("dpo", tuple(Pair(row, replace(row), 0.0) for row in rows)),
        KtoRecipe: ("kto", tuple(Unpaired(row, desirable=True) for row in rows)),
    }
    section, loaded = given[kind]
    monkeypatch.setattr(feeder, "configure_process", lambda spec: ProcessFacts(1, "host"))
    monkeypatch.setattr(feeder, "load_model_config", lambda path: DENSE)
    monkeypatch.setattr(feeder, "load_supervised", lambda *given: RowSet(loaded, 0))
    sections = {"data": {"train": "rows.jsonl", "shuffle": False}, "train": {"steps": 2, "batch_samples": 2}}
    recipe = kind.model_validate({"model": {"path": "m"}, **sections, section: {}})
    parts: Any = feeder.FeederActor(None, recipe, 1).take(1)  # type: ignore[arg-type]
    blocks = parts[2::2]
    assert len(blocks) == (2 if kind is KtoRecipe else 1)
    expected = [row.images for row in rows for _ in range(2 if kind is DpoRecipe else 1)]
    for block in blocks:
        assert [block.images[place] for place in np.argsort(block.sample_index)] == expected
