"""What is read from config.json, and every folder that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import UserError
from megarl.models.config import ModelConfig, Rope
from megarl.models.hf_config import load_model_config, parse_model_config

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "eos_token_id": [151645, 151643],
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "rope_scaling": None,
}
PATH = Path("model/config.json")


def parse(**changes: Any) -> ModelConfig:
    return parse_model_config({key: value for key, value in {**QWEN3, **changes}.items() if value != "absent"}, PATH)


def test_every_field_of_a_published_config() -> None:
    assert parse() == ModelConfig(
        family="qwen3",
        architecture="Qwen3ForCausalLM",
        num_layers=28,
        hidden_size=1024,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        ffn_hidden_size=3072,
        vocab_size=151936,
        max_positions=40960,
        rope=Rope(1e6),
        norm_eps=1e-6,
        tied_embeddings=True,
        qkv_bias=False,
        qk_norm=True,
        eos_token_ids=(151645, 151643),
    )


def test_what_may_be_left_out() -> None:
    config = parse(
        architectures=["Qwen2ForCausalLM"],
        num_key_value_heads="absent",
        head_dim="absent",
        tie_word_embeddings="absent",
        rope_theta="absent",
        eos_token_id=7,
    )
    assert (config.num_kv_heads, config.head_dim, config.tied_embeddings) == (16, 64, False)
    assert (config.rope, config.eos_token_ids) == (Rope(10000.0), (7,))
    assert (config.qkv_bias, config.qk_norm) == (True, False)
    assert parse(eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize("tp", [1, 2, 3, 8])
def test_the_vocabulary_is_padded_to_a_multiple(tp: int) -> None:
    padded = parse(vocab_size=97).padded_vocab_size(tp)
    assert padded % tp == 0
    assert 97 <= padded < 97 + tp


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "Qwen2ForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": "absent"}, ["missing", "Qwen3ForCausalLM"]),
        ({"intermediate_size": "absent", "vocab_size": "absent"}, ["lacks intermediate_size, vocab_size"]),
        ({"attention_bias": True}, ["attention_bias=True"]),
        ({"mlp_bias": True, "hidden_act": "gelu"}, ["mlp_bias=True", "hidden_act='gelu'"]),
        ({"use_sliding_window": "yes", "sliding_window": 8}, ["use_sliding_window is 'yes'"]),
        ({"layer_types": ["full_attention"]}, ["layer_types=['full_attention']"]),
        ({"layer_types": ["chunked_attention"] * 28}, ["layer_types", "chunked_attention"]),
        ({"layer_types": ["sliding_attention"] * 28}, ["layer_types", "sliding_window=None"]),
        ({"architectures": ["LlamaForCausalLM"], "use_sliding_window": True}, ["use_sliding_window=True"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings is 'yes'", "true or false"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantised weights"]),
        ({"num_hidden_layers": "many"}, ["num_hidden_layers is 'many'"]),
        ({"num_attention_heads": 0}, ["num_attention_heads is 0"]),
        ({"vocab_size": True}, ["vocab_size is True"]),
        ({"num_key_value_heads": 5}, ["num_key_value_heads 5", "num_attention_heads 16"]),
        ({"rms_norm_eps": "small"}, ["rms_norm_eps is 'small'"]),
    ],
)
def test_a_config_that_is_not_supported(changes: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(UserError) as error:
        parse(**changes)
    for part in [str(PATH), *says]:
        assert part in str(error.value)


def folder(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).write_text(json.dumps(QWEN3))
    return root


def test_a_folder_that_is_whole(tmp_path: Path) -> None:
    assert load_model_config(folder(tmp_path, "config.json", "tokenizer.json", "model.safetensors")) == parse()


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["tokenizer.json", "model.safetensors"], "no config.json"),
        (["config.json", "model.safetensors"], "no a tokenizer"),
        (["config.json", "tokenizer_config.json"], "no weights"),
        ([], "no config.json and no a tokenizer"),
    ],
)
def test_a_folder_that_lacks_something(names: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        load_model_config(folder(tmp_path, *names))
    assert says in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere does not exist.*model\.path"):
        load_model_config(tmp_path / "nowhere")


@pytest.mark.parametrize(("text", "says"), [("{", "is not JSON"), ("[]", "holds list")])
def test_a_config_that_is_no_object(text: str, says: str, tmp_path: Path) -> None:
    folder(tmp_path, "tokenizer.json", "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=says):
        load_model_config(tmp_path)
