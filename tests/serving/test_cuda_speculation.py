"""Flags by which CUDA's servers guess tokens ahead, settled by SGLang's own code; see test_cuda_flags.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megarl.models.known_configs import known_config
from megarl.serving.server import ServerSpec
from megarl.serving.server_models import KEPT_DRAFT
from tests.serving.test_cuda_flags import CUDA, RECIPE_NAMES, SLEEPS, own_spec, settled

NGRAM, NEXTN = (("--speculative-algorithm", name) for name in ("NGRAM", "NEXTN"))
CHAIN = ("--speculative-ngram-max-bfs-breadth", "1")
# Models with layers of their own that predict further tokens: a recipe's, one that is known by its config.json, or LARGE's.
DEEPSEEK, GLM = "deepseek_v3_moe_512", "zai-org/GLM-4.7-Flash"
OWN_LAYERS = (DEEPSEEK, GLM, "qwen3_next", "qwen3_5")


def spec_of(name: str) -> ServerSpec:
    """Its own servers, without what its recipe has them share."""
    if (config := known_config(name)) is not None:
        return replace(own_spec(RECIPE_NAMES[0]), model=config.parent, tp=1, context_length=2048)
    return own_spec(name)


def asked() -> dict[str, ServerSpec]:
    """By what they are."""
    found = {}
    for name in OWN_LAYERS:
        own = spec_of(name)
        found[f"{name} awake"] = replace(own, extra=(*own.extra, *NEXTN))
        found[f"{name} asleep"] = replace(own, extra=(*own.extra, *NEXTN, KEPT_DRAFT), **SLEEPS)
    for name in ("qwen3_4b_gsm8k_8", "qwen3_30b_a3b_grpo_32"):
        own = own_spec(name)
        found[f"{name} n-grams"] = replace(own, extra=(*own.extra, *NGRAM))
    found["n-grams in pages"] = replace(spec_of(GLM), extra=(*NGRAM, "--page-size", "64"))
    found["n-grams in a chain"] = replace(spec_of(GLM), extra=(*NGRAM, *CHAIN))
    return found


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    return settled("H100", {what: spec.words(CUDA, "127.0.0.1", 30000) for what, spec in asked().items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_LAYERS)
@pytest.mark.parametrize("how", ["awake", "asleep"])
def test_layers_of_the_models_own_guess(name: str, how: str, answers: dict[str, Any]) -> None:
    answer, spec = answers[f"{name} {how}"], asked()[f"{name} {how}"]
    assert answer["problem"] is None
    found = answer["settled"]
    assert found["speculative_algorithm"] == "EAGLE" and found["speculative_num_steps"] >= 1
    assert found["speculative_draft_model_path"] in (str(spec.model), None)  # None: the model's own folder, too
    assert found["max_running_requests"] == spec.max_running_requests
    assert found["enable_draft_weights_cpu_backup"] == (how == "asleep")
    assert not found["enable_weights_cpu_backup"]
    assert found["speculative_accept_threshold_single"] == found["speculative_accept_threshold_acc"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("what", ["qwen3_4b_gsm8k_8 n-grams", "qwen3_30b_a3b_grpo_32 n-grams", "n-grams in a chain"])
def test_ngrams_guess(what: str, answers: dict[str, Any]) -> None:
    answer = answers[what]
    assert answer["problem"] is None
    assert answer["settled"]["speculative_algorithm"] == "NGRAM"
    assert answer["settled"]["speculative_draft_model_path"] is None
    assert answer["settled"]["max_running_requests"] == asked()[what].max_running_requests


@pytest.mark.slow
def test_ngrams_in_a_tree_want_a_cache_of_single_tokens(answers: dict[str, Any]) -> None:
    assert "is unstable" in answers["n-grams in pages"]["problem"]
