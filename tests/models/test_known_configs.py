"""The configs of published models that the package carries: whole, of the published sizes, and found by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from setuptools import find_packages
from transformers import AutoConfig

import megarl
from megarl.models.flops import forward_flops
from megarl.models.hf_config import parse_model_config
from megarl.models.known_configs import FOLDER, known_config, known_names
from megarl.placement.sizes import model_sizes

# Parameters in billions, as the models' own reports have them (DeepSeek-V3 without its module for further tokens).
PUBLISHED = {
    "Qwen/Qwen3-4B": 4.02,
    "Qwen/Qwen3-8B": 8.19,
    "Qwen/Qwen3-30B-A3B": 30.5,
    "Qwen/Qwen3-235B-A22B": 235.1,
    "Qwen/Qwen1.5-MoE-A2.7B": 14.3,
    "Qwen/Qwen2-57B-A14B": 57.4,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 79.67,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8.292,
    "Qwen/Qwen3-VL-4B-Instruct": 4.438,
    "Qwen/Qwen3.5-9B": 9,
    "Qwen/Qwen3.5-35B-A3B": 35,
    "meta-llama/Llama-3.1-8B-Instruct": 8.03,
    "meta-llama/Llama-3.1-70B-Instruct": 70.6,
    "microsoft/phi-4": 14.7,
    "microsoft/Phi-4-mini-instruct": 3.836,
    "deepseek-ai/DeepSeek-V2": 236,
    "deepseek-ai/DeepSeek-V2-Lite": 15.7,
    "baidu/ERNIE-4.5-21B-A3B-PT": 22,
    "google/gemma-4-31B-it": 30.7,
    "google/gemma-4-26B-A4B-it": 25.2,
    "deepseek-ai/DeepSeek-V3": 671.0,
    "openai/gpt-oss-20b": 20.9,
    "openai/gpt-oss-120b": 116.8,
    "zai-org/GLM-4-9B-0414": 9.40,
    "zai-org/GLM-4-32B-0414": 32.6,
    "zai-org/GLM-4.5-Air": 106,
    "zai-org/GLM-4.5": 355,
    "zai-org/GLM-4.7-Flash": 30,
    "ByteDance-Seed/Seed-OSS-36B-Instruct": 36,
    "MiniMaxAI/MiniMax-M2": 230,
}
VISION = {
    "Qwen/Qwen2.5-VL-7B-Instruct": "Qwen2_5_VLForConditionalGeneration",
    "Qwen/Qwen3-VL-4B-Instruct": "Qwen3VLForConditionalGeneration",
}
# Of a token's pass, without both vocabulary matrices.
ACTIVE = {
    "openai/gpt-oss-20b": 3,
    "openai/gpt-oss-120b": 5,
    "Qwen/Qwen1.5-MoE-A2.7B": 2,
    "Qwen/Qwen2-57B-A14B": 13,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 3,
    "baidu/ERNIE-4.5-21B-A3B-PT": 3,
    "zai-org/GLM-4.5-Air": 12,
    "zai-org/GLM-4.5": 32,
    "zai-org/GLM-4.7-Flash": 3,
    "google/gemma-4-26B-A4B-it": 3,
    "Qwen/Qwen3.5-35B-A3B": 2,
    "MiniMaxAI/MiniMax-M2": 10,
}


def test_these_are_known() -> None:
    assert set(known_names()) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_known_config_is_of_the_published_size_and_read_alike_by_transformers(name: str) -> None:
    path = known_config(name)
    assert path is not None
    config = parse_model_config(json.loads(path.read_text()), path)
    tower = config.vision.tower_elements if config.vision else 0
    rounded = 0.01 if isinstance(PUBLISHED[name], int) else 0.003
    assert (model_sizes(config).total + tower) / 1e9 == pytest.approx(PUBLISHED[name], rel=rounded)
    if name in ACTIVE:
        forward = forward_flops(config, [1])
        assert round((forward.projections + forward.mlp) / 2e9) == ACTIVE[name]
    theirs = AutoConfig.from_pretrained(path.parent)
    text = theirs.get_text_config()
    assert theirs.architectures[0] == (config.architecture if config.vision is None else VISION[name])
    assert (config.num_layers, config.hidden_size) == (text.num_hidden_layers, text.hidden_size)
    assert config.max_positions == text.max_position_embeddings


@pytest.mark.parametrize("path", ["Qwen/Qwen3-4B", "models/Qwen3-4B", "/scratch/models/Qwen3-4B", "Qwen3-4B-bf16"])
def test_a_model_is_found_by_its_name_and_by_the_end_of_a_path(path: str) -> None:
    assert known_config(Path(path)) == FOLDER / "Qwen" / "Qwen3-4B" / "config.json"


@pytest.mark.parametrize("path", ["Qwen", "Qwen/Qwen3", "Qwen3-4B/hf", "Qwen/Qwen3-4B-Base", ".", "models/../x"])
def test_another_name_is_not_taken_for_one_of_them(path: str) -> None:
    assert known_config(path) is None


def test_the_files_are_part_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, dict[str, list[str]]] = {}
    root = Path(megarl.__file__).parent
    monkeypatch.chdir(root.parent)
    monkeypatch.setattr("setuptools.setup", lambda **values: given.update(values))
    exec(compile((root.parent / "setup.py").read_text(), "setup.py", "exec"), {})
    shipped = {path for pattern in given["package_data"]["megarl"] for path in root.glob(pattern)}
    assert {FOLDER / name / "config.json" for name in PUBLISHED} <= shipped
    assert "megarl.models" in find_packages(include=["megarl", "megarl.*"])
