"""What servers of models that see images are told: by the model's folder alone, and as SGLang takes it on a node of 8 H100."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.core.platform import get_platform
from megarl.placement.cluster import make_cluster
from megarl.placement.server_share import chosen_share
from megarl.placement.workload import read_model
from megarl.serving.server import ServerSpec
from megarl.serving.server_flags import SPARE_TOKENS
from megarl.serving.server_models import (
    IMAGE_ENV,
    IMAGE_FLAGS,
    KEPT_WEIGHTS,
    SEEN_MB,
    VARIABLE,
    max_positions,
    unused_models,
)
from tests.serving.test_cuda_flags import SLEEPS, settled
from tests.support.large_vision import LARGE, write_large_vision
from tests.support.vision import QWEN2_5, QWEN3, SQUARE

CUDA, CPU = get_platform("cuda"), get_platform("cpu")
ASLEEP = ("asleep at times", SLEEPS)
SEEING = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"}  # SGLang's modules of these models
FORMS: dict[str, dict[str, Any]] = {
    "apart": {},
    ASLEEP[0]: ASLEEP[1],
    "cut": {"tp": 4, "kv_tokens": 65536},
    "with a user's own": {"extra": ("--mm-preprocess-cache-size-mb", "64")},
}


def folder(tmp_path: Path, **config: object) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("architecture", SQUARE)
def test_a_server_is_told_of_images_where_its_model_sees(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ServerSpec(folder(tmp_path, architectures=[architecture]), "float32")
    words = spec.words(CPU, "127.0.0.1", 1)
    assert " ".join(IMAGE_FLAGS) in " ".join(words)
    own = replace(spec, extra=("--image-processor-backend", "torchvision")).words(CPU, "127.0.0.1", 1)
    assert own.index("torchvision") > own.index("pil")  # of a flag that comes twice the last counts
    assert spec.env().items() >= IMAGE_ENV.items()
    monkeypatch.setenv("SGLANG_VLM_CACHE_SIZE_MB", "2048")
    assert spec.env()["SGLANG_VLM_CACHE_SIZE_MB"] == "2048"
    used = SEEING - set(unused_models(spec.model))
    assert len(used) == 1 and not used.intersection(spec.env()[VARIABLE].split(","))


def test_of_a_tower_that_learns_a_server_keeps_nothing_that_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learns = ServerSpec(folder(tmp_path, architectures=[QWEN3]), "float32", tower_learns=True)
    for asked in (None, "2048"):
        if asked is not None:
            monkeypatch.setenv(SEEN_MB, asked)
        assert learns.env()[SEEN_MB] == "0"
        others = {name: value for name, value in IMAGE_ENV.items() if name != SEEN_MB}
        assert learns.env().items() >= others.items()
    assert SEEN_MB not in replace(learns, model=folder(tmp_path, architectures=["Qwen2ForCausalLM"])).env()


def test_a_server_of_a_model_that_does_not_see_hears_nothing_of_images(tmp_path: Path) -> None:
    for architecture in ("Qwen2ForCausalLM", "Glm4vForConditionalGeneration"):
        spec = ServerSpec(folder(tmp_path, architectures=[architecture]), "float32", offloaded=True)
        for platform in (CPU, CUDA):
            flags = {word for word in (*IMAGE_FLAGS, KEPT_WEIGHTS) if word.startswith("--")}
            assert not flags.intersection(spec.words(platform, "127.0.0.1", 1))
        assert not IMAGE_ENV.keys() & spec.env().keys()


def test_a_tower_is_kept_where_the_memory_of_weights_is_given_back(tmp_path: Path) -> None:
    spec = ServerSpec(folder(tmp_path, architectures=[QWEN2_5]), "bfloat16")
    asleep = replace(spec, offloaded=True)
    assert KEPT_WEIGHTS in asleep.words(CUDA, "127.0.0.1", 1)
    assert KEPT_WEIGHTS not in spec.words(CUDA, "127.0.0.1", 1)
    assert KEPT_WEIGHTS not in asleep.words(CPU, "127.0.0.1", 1)  # it gives nothing back there


def test_the_longest_context_of_a_text_part_is_that_of_the_model(tmp_path: Path) -> None:
    text = {"max_position_embeddings": 2048}
    assert max_positions(folder(tmp_path, architectures=[QWEN3], text_config=text)) == 2048
    assert max_positions(folder(tmp_path, max_position_embeddings=64, text_config=text)) == 64


@pytest.mark.slow
@pytest.mark.needs("SGLang")
def test_sglang_takes_what_large_models_that_see_are_told(tmp_path: Path) -> None:
    asked, planned = {}, {}
    for name in LARGE:
        spec = ServerSpec(write_large_vision(tmp_path / name, name), "bfloat16")
        for form, differs in FORMS.items() if LARGE[name][0] in (QWEN2_5, QWEN3) else [("apart", {}), ASLEEP]:
            each = replace(spec, **differs)
            asked[f"{name} {form}"] = each.words(CUDA, "127.0.0.1", 30000)
            tokens = None if each.kv_tokens is None else each.kv_tokens + SPARE_TOKENS
            if form == ASLEEP[0]:
                continue  # whose share is told
            planned[f"{name} {form}"] = chosen_share(
                read_model(spec.model), each.tp, make_cluster("H100", 1), each.max_running_requests, tokens
            )
    found = settled("H100", asked)
    assert {name: each["problem"] for name, each in found.items()} == dict.fromkeys(asked)
    for name, each in found.items():
        settings = each["settled"]
        assert settings["enable_multimodal"] is True, name
        assert settings["image_processor_backend"] == "pil", name
        assert settings["mm_process_config"] == {"image": {"do_resize": False}}, name
        assert settings["mm_feature_transport"] == "cpu", name
        assert settings["mm_preprocess_cache_size_mb"] == (64 if "own" in name else 512), name
        assert settings["attention_backend"] == "fa3", name
        assert settings["enable_weights_cpu_backup"] is ("asleep" in name), name
    shares = {name: each["settled"]["mem_fraction_static"] for name, each in found.items() if name in planned}
    assert planned == pytest.approx(shares, abs=0.002)
