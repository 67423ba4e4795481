"""What is read from config.json, and every folder that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

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
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# DeepSeek-V3's own.
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


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


def test_one_architecture_may_be_a_string() -> None:
    assert parse(architectures="Qwen3ForCausalLM") == parse()
    assert parse(architectures="Qwen3ForSequenceClassification", id2label={"0": "SCORE"}).head == "score"


@pytest.mark.parametrize(
    "labels",
    [
        {},
        {"num_labels": 1},
        {"num_labels": 3},
        {"id2label": {"0": "SCORE"}},
        {"id2label": {"0": "a", "1": "b"}},
        {"num_labels": 3, "id2label": {"0": "SCORE"}},
        {"num_labels": 1, "id2label": {"0": "a", "1": "b"}},
    ],
)
def test_labels_are_as_many_as_transformers_takes(labels: dict[str, Any]) -> None:
    found, score = Qwen3Config.from_dict(dict(labels)).num_labels, {"architectures": ["Qwen3ForSequenceClassification"]}
    if found == 1:
        assert parse(**score, **labels).head == "score"
    else:
        with pytest.raises(UserError, match=rf"must have one label, the score \(num_labels=1\); it has {found}"):
            parse(**score, **labels)


def test_fp8_weights_have_blocks() -> None:
    assert parse(quantization_config=FP8).fp8_block == (128, 128)
    assert parse(quantization_config={**FP8, "weight_block_size": [64, 32]}).fp8_block == (64, 32)
    assert parse(quantization_config=None) == parse()


def test_the_padding_token_is_the_one_that_transformers_would_hold() -> None:
    def pad(**changes: Any) -> int | None:
        return parse(vocab_size=97, **changes).pad_token_id

    assert (pad(pad_token_id=5), pad(pad_token_id=-1), pad(pad_token_id=None), pad()) == (5, 96, None, None)
    gemma = {"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh", "hidden_act": None}
    assert (pad(**gemma), pad(**gemma, pad_token_id=None)) == (0, None)
    for wrong in (97, -98, "5", [5], True, 5.0):
        with pytest.raises(UserError, match=r"pad_token_id is .*from 0 to 96"):
            pad(pad_token_id=wrong)


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
        ({"intermediate_size": "absent", "vocab_size": "absent"}, ["lacks vocab_size, intermediate_size"]),
        ({"attention_bias": True}, ["attention_bias=True"]),
        ({"mlp_bias": True, "hidden_act": "gelu"}, ["mlp_bias=True", "hidden_act='gelu'"]),
        ({"use_sliding_window": "yes", "sliding_window": 8}, ["use_sliding_window is 'yes'"]),
        ({"layer_types": ["full_attention"]}, ["layer_types has 1 entries, and num_hidden_layers is 28"]),
        ({"layer_types": []}, ["layer_types has 0 entries, and num_hidden_layers is 28"]),
        ({"layer_types": "full_attention"}, ["layer_types is 'full_attention'; a list of strings is wanted"]),
        ({"layer_types": ["chunked_attention"] * 28}, ["layer_types has 'chunked_attention'; supported are"]),
        ({"layer_types": ["sliding_attention"] * 28}, ["layer_types", "in layers 0, 1, 2, 3, 4 and 23 more", "=None"]),
        ({"architectures": ["two\nlines"]}, ["architecture 'two\\nlines' is not supported"]),
        ({"architectures": {"x": 1}}, ["architectures is {'x': 1}; a list of strings is wanted"]),
        ({"architectures": ["Qwen3ForCausalLM", 5]}, ["architectures is ['Qwen3ForCausalLM', 5]"]),
        ({"eos_token_id": "x"}, ["eos_token_id is 'x'; a whole number or a list of whole numbers from 0 is wanted"]),
        ({"eos_token_id": [1, "x"]}, ["eos_token_id is [1, 'x']"]),
        ({"num_hidden_layers": 10**12}, ["num_hidden_layers is 1000000000000; a whole number from 1 to 2000"]),
        ({"head_dim": 127}, ["head_dim is 127; RoPE turns pairs"]),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, ["low_freq_factor is 4.0; less than high_freq_factor"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps is 1000", "...; a number over 0"]),
        ({"architectures": ["LlamaForCausalLM"], "use_sliding_window": True}, ["use_sliding_window=True"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings is 'yes'", "true or false"]),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, ["quant_method", "awq", "quantised weights"]),
        ({"quantization_config": {**FP8, "weight_block_size": None}}, ["weight_block_size"]),
        ({"quantization_config": {**FP8, "weight_block_size": [128]}}, ["weight_block_size"]),
        ({"quantization_config": {**FP8, "weight_block_size": [128, 0]}}, ["weight_block_size"]),
        ({"quantization_config": {**FP8, "fmt": "e5m2"}}, ["e5m2"]),
        ({"quantization_config": "fp8"}, ["quantization_config is 'fp8'; an object is wanted"]),
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
        (["config.json", "model.safetensors"], "has no tokenizer ("),
        (["config.json", "tokenizer.json", "pytorch_model.bin"], "holds its weights as .bin files, and"),
        (["config.json", "tokenizer_config.json"], "no weights"),
        ([], "no config.json and no tokenizer"),
    ],
)
def test_a_folder_that_lacks_something(names: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        load_model_config(folder(tmp_path, *names))
    assert says in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_a_runs_folder_is_not_its_model_which_is_named(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    folder(tmp_path / "hf", "config.json")
    with pytest.raises(UserError, match=rf"has no config\.json.* The model of this run is {tmp_path}/hf\.$"):
        load_model_config(tmp_path)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere does not exist.*model\.path"):
        load_model_config(tmp_path / "nowhere")


def test_generation_settings_that_servers_could_not_read(tmp_path: Path) -> None:
    folder(tmp_path, "config.json", "tokenizer.json", "model.safetensors")
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"generation_config\.json holds list.*remove the file"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(("text", "says"), [("{", "is not JSON"), ("[]", "holds list"), ("[" * 100_000, "too deeply")])
def test_a_config_that_is_no_object(text: str, says: str, tmp_path: Path) -> None:
    folder(tmp_path, "tokenizer.json", "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=says):
        load_model_config(tmp_path)


def _tiny(architecture: str, **changes: Any) -> ModelConfig:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": "absent"}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return parse(architectures=[architecture], **sizes | experts | changes)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "SeedOssForCausalLM"])
def test_a_head_width_of_null_is_its_share_where_transformers_takes_it_so(architecture: str) -> None:
    assert _tiny(architecture, head_dim=None).head_dim == 16


@pytest.mark.parametrize(
    "architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "Olmo2ForCausalLM", "OlmoeForCausalLM"]
)
def test_a_head_width_of_null_is_refused_where_transformers_makes_no_model_of_it(architecture: str) -> None:
    with pytest.raises(UserError, match="head_dim is None; a whole number, or no such key, is wanted"):
        _tiny(architecture, head_dim=None)


def test_a_head_width_that_is_not_its_share_is_refused_for_olmoe() -> None:
    """transformers sizes its norms by the hidden size: such a model is made, and fails at its first token."""
    assert _tiny("OlmoeForCausalLM", head_dim=16) == _tiny("OlmoeForCausalLM")
    with pytest.raises(UserError, match="head_dim is 32; hidden_size 64 / num_attention_heads 4 is wanted"):
        _tiny("OlmoeForCausalLM", head_dim=32)
    assert _tiny("Olmo2ForCausalLM", head_dim=32).head_dim == 32
