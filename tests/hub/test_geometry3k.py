"""The recipe for a model that sees, on Geometry3K: its rows as the hub has them, a problem and its figure."""

from __future__ import annotations

import io

import pyarrow
import pyarrow.parquet

from megarl.core.shipped import shipped_recipe
from megarl.data.prompts import load_prompts
from megarl.hub.recipe import localize
from megarl.recipe.load import load_recipe
from megarl.rewards.math import math
from tests.hub.conftest import MODEL
from tests.support.sight import picture, seeing_tokenizer, sight_for
from tests.support.stand_in_hub import StandInHub

# As datasets writes the card of rows with images.
CARD = """\
---
dataset_info:
  features:
  - {name: images, sequence: image}
  - {name: problem, dtype: string}
  - {name: answer, dtype: string}
configs:
- config_name: default
  data_files:
  - {split: train, path: data/train-*}
  - {split: validation, path: data/validation-*}
  - {split: test, path: data/test-*}
---
"""


def parquet(count: int) -> bytes:
    rows = [
        {
            "images": [{"bytes": picture(8, 4, number), "path": None}],
            "problem": "<image>Find x so that each quadrilateral is a parallelogram.",
            "answer": "8 \\sqrt { 3 }",
        }
        for number in range(count)
    ]
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def test_its_rows_are_asked_with_their_figures_and_graded(hub: StandInHub) -> None:
    splits = {"train": parquet(130), "validation": parquet(1), "test": parquet(3)}
    files = {f"data/{split}-00000-of-00001.parquet": rows for split, rows in splits.items()}
    hub.put("dataset", "hiyouga/geometry3k", {"README.md": CARD.encode(), **files})
    recipe = shipped_recipe("qwen25_vl_7b_geo3k_8")
    assert recipe
    loaded = load_recipe(recipe, [f"model.path={MODEL}", "cluster.platform=cpu"])
    data = localize(loaded, lambda folder: None, lambda line: None).recipe.data
    assert data.eval is not None and data.eval.parts[-2:] == ("data", "test-00000-of-00001.parquet")
    tokenizer = seeing_tokenizer()
    prompts = load_prompts(data.train, tokenizer, data, sight=sight_for(tokenizer)).prompts
    assert len(prompts) == 130 and {len(each.images) for each in prompts} == {1}
    assert "<|vision_start|><|image_pad|><|vision_end|>Find x so" in prompts[0].text
    assert f"parallelogram.{data.prompt_suffix}" in prompts[0].text and "\\boxed{}" in data.prompt_suffix
    for response, reward in ((r"So \boxed{8\sqrt{3}}", 1.0), (r"\boxed{13.8564}", 0.0), (r"\boxed{8}", 0.0)):
        assert math(prompts[0].text, response, prompts[0].answer, {}) == reward
