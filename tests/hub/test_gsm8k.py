"""The recipe for a real model on GSM8K: planned from its config alone, and its rows read as the hub has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.core.shipped import shipped_recipe
from megarl.data.chat import load_tokenizer
from megarl.data.prompts import load_prompts
from megarl.hub.recipe import localize
from megarl.placement.cluster import make_cluster
from megarl.recipe.load import load_recipe
from megarl.rewards.math import math
from megarl.run.plan import PlanOptions, run_plan
from tests.hub.conftest import CARD, MODEL, parquet
from tests.support.stand_in_hub import StandInHub

# https://huggingface.co/Qwen/Qwen3-4B/blob/main/config.json, but for keys that say nothing of its sizes.
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


@pytest.fixture
def recipe(hub: StandInHub) -> Path:
    hub.put("model", "Qwen/Qwen3-4B", {"config.json": json.dumps(CONFIG).encode()})
    splits = {"train": parquet(1, 140), "test": parquet(190, 5)}
    files = {
        f"{config}/{split}-00000-of-00001.parquet": rows
        for config in ("main", "socratic")
        for split, rows in splits.items()
    }
    hub.put("dataset", "openai/gsm8k", {"README.md": CARD.encode(), **files})
    path = shipped_recipe("qwen3_4b_gsm8k_8")
    assert path
    return path


def test_it_is_planned_for_the_gpus_of_its_own_words(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--device H100 --nodes 1\n" in recipe.read_text()
    run_plan(recipe, [], make_cluster("H100", 1), PlanOptions(as_text=True))
    assert json.loads(capsys.readouterr().out)["best"]["step_s"] > 0


def test_its_rows_are_asked_and_graded_as_gsm8k_means_them(recipe: Path) -> None:
    loaded = load_recipe(recipe, [f"model.path={MODEL}", "cluster.platform=cpu", "data.max_prompt_tokens=400"])
    data = localize(loaded, lambda folder: None, lambda line: None).recipe.data
    assert data.eval is not None and data.eval.parts[-2:] == ("main", "test-00000-of-00001.parquet")
    tokenizer = load_tokenizer(localize(loaded, lambda folder: None, lambda line: None).recipe.model.path)
    prompts = load_prompts(data.train, tokenizer, data).prompts
    assert len(prompts) == 140 and prompts[0].answer == "2"
    asked = data.prompt_suffix
    assert f"1 and 1?{asked}" in prompts[0].text and "####" in asked
    for response, reward in (("1 + 1 = 2\n#### 2", 1.0), ("1 + 1 = 2\n#### 3", 0.0), ("2", 0.0)):
        assert math(prompts[0].text, response, prompts[0].answer, {}) == reward
