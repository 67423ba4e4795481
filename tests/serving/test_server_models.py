"""Which of SGLang's models a server is told not to load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3Config, GptOssConfig

from megarl.core.platform import PlatformName, get_platform
from megarl.models.families import FAMILIES
from megarl.serving import server_models
from megarl.serving.server import LONGER, ServerSpec
from megarl.serving.server_models import DELTA, ROUTING, VARIABLE, missing_settings, unused_models


def folder(tmp_path: Path, **config: object) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("architecture", FAMILIES)
def test_of_each_family_one_module_is_loaded(tmp_path: Path, architecture: str) -> None:
    known = {file.stem for file in server_models._folder().glob("*.py")}
    [used] = known - set(unused_models(folder(tmp_path, architectures=[architecture])))
    built_as = (server_models.BUILT_AS | server_models.RENAMED).get(architecture, architecture)
    assert f"class {built_as}(" in (server_models._folder() / f"{used}.py").read_text()


@pytest.mark.parametrize("architectures", [["NobodysForCausalLM"], [], None])
def test_of_a_model_that_no_module_registers_all_are_loaded(tmp_path: Path, architectures: object) -> None:
    assert unused_models(folder(tmp_path, architectures=architectures)) == ()


def test_of_a_folder_without_a_config_all_are_loaded(tmp_path: Path) -> None:
    assert unused_models(tmp_path) == ()


def test_where_a_user_asks_for_more_all_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = folder(tmp_path, architectures=["Qwen3ForCausalLM"])
    monkeypatch.delenv(VARIABLE, raising=False)
    assert "llama" in ServerSpec(model, "float32").env()[VARIABLE].split(",")
    assert ServerSpec(model, "float32", extra=("--speculative-algorithm", "EAGLE")).env() == {}
    monkeypatch.setenv(VARIABLE, "gemma")
    assert ServerSpec(model, "float32").env() == {}


@pytest.mark.parametrize(
    ("architecture", "differs", "told"),
    [
        ("Qwen3MoeForCausalLM", {}, True),
        ("Qwen3MoeForCausalLM", {"quantized": True}, False),
        ("Qwen3MoeForCausalLM", {"quantized": True, "extra": (ROUTING,)}, True),
        ("Qwen3MoeForCausalLM", {"extra": ("--moe-a2a-backend=deepep",)}, False),
        ("Qwen3MoeForCausalLM", {"extra": ("--quantization", "fp8", ROUTING)}, False),
        ("GptOssForCausalLM", {}, False),
        ("GptOssForCausalLM", {"extra": (ROUTING,)}, True),
        ("Qwen3ForCausalLM", {}, False),
    ],
)
def test_a_server_on_devices_is_told_kernels_of_experts_where_sglangs_may_not_do(
    tmp_path: Path, architecture: str, differs: dict[str, Any], *, told: bool
) -> None:
    spec = ServerSpec(folder(tmp_path, architectures=[architecture]), "bfloat16", **differs)
    assert ("--moe-runner-backend" in spec.words(get_platform("cuda"), "127.0.0.1", 1)) is told
    assert "--moe-runner-backend" not in spec.words(get_platform("cpu"), "127.0.0.1", 1)


@pytest.mark.parametrize(("asked", "allowed"), [(None, False), (57, False), (58, True), (64, True), (65, False)])
def test_a_context_beyond_the_models_is_for_what_sglang_keeps_alone(
    tmp_path: Path, asked: int | None, *, allowed: bool
) -> None:
    model = folder(tmp_path, architectures=["Qwen3ForCausalLM"], max_position_embeddings=64)
    spec = ServerSpec(model, "float32", kv_tokens=100, context_length=asked)
    assert (LONGER in spec.env()) is allowed
    flags = spec.flags("127.0.0.1", 1)
    assert flags[flags.index("--max-total-tokens") + 1] == "107"
    assert asked is None or flags[flags.index("--context-length") + 1] == str(asked + 7)


@pytest.mark.parametrize("architecture", DELTA)
def test_the_period_of_full_attention_is_counted_for_sglang(tmp_path: Path, architecture: str) -> None:
    def told(layers: str, **keys: object) -> dict[str, object]:
        kinds = [{"L": "linear_attention", "G": "full_attention"}[each] for each in layers] or None
        return missing_settings(folder(tmp_path, architectures=[architecture], layer_types=kinds, **keys))

    key = "full_attention_interval"
    assert told("LLGLLG") == told("LLGLLG", full_attention_interval=4) == {key: 3}
    assert told("LLGLLG", full_attention_interval=3) == told("", full_attention_interval=4) == {}
    assert told("") == {key: 4}
    assert told("GG") == {key: 1}


def test_rope_that_stands_in_its_object_alone_is_told_of_qwen3_next(tmp_path: Path) -> None:
    def told(**keys: object) -> dict[str, object]:
        names = {"architectures": ["Qwen3NextForCausalLM"], "full_attention_interval": 4}
        return missing_settings(folder(tmp_path, **names, **keys))

    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}
    assert told(rope_parameters=rope) == {"rope_theta": 1e7, "partial_rotary_factor": 0.5}
    assert told(rope_parameters=rope, rope_theta=1e7, partial_rotary_factor=0.5) == {}
    assert told(rope_parameters={**rope, "partial_rotary_factor": 0.25}, rope_theta=1e7) == {}
    assert told(rope_theta=1e7, rope_scaling=None) == {}


@pytest.mark.parametrize(
    ("kinds", "dense"), [(None, 1), (["dense"] * 2 + ["sparse"], 2), (["sparse"] * 2, 0), (["dense"] * 3, 3)]
)
def test_dense_layers_that_transformers_names_are_counted_for_sglang(
    tmp_path: Path, kinds: list[str] | None, dense: int
) -> None:
    config = {"architectures": ["Glm4MoeLiteForCausalLM"], "mlp_layer_types": kinds}
    assert missing_settings(folder(tmp_path, **config)) == {"first_k_dense_replace": dense}
    assert missing_settings(folder(tmp_path, **config, first_k_dense_replace=dense)) == {}


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({}, {}),
        ({"partial_rotary_factor": 0.5}, {}),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, 0.5),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}, "rope_parameters": {"partial_rotary_factor": 0.25}}, 0.5),
        ({"partial_rotary_factor": 0.25, "rope_parameters": {"partial_rotary_factor": 0.75}}, 0.75),
        ({"partial_rotary_factor": None}, 1.0),
    ],
)
def test_sglang_is_told_which_share_of_a_head_transformers_rotates(tmp_path: Path, keys: Any, told: Any) -> None:
    found = missing_settings(folder(tmp_path, architectures=["Phi3ForCausalLM"], **keys))
    assert found == (told if told == {} else {"partial_rotary_factor": told})


def test_sglang_is_told_the_base_that_it_drops_of_olmo_3(tmp_path: Path) -> None:
    def told(**keys: Any) -> Any:
        return missing_settings(folder(tmp_path, architectures=["Olmo3ForCausalLM"], **keys))

    base = {"rope_type": "default", "rope_theta": 500000.0}
    assert told(rope_parameters=base) == {"rope_theta": 500000.0}
    assert told(rope_parameters=base, rope_theta=10000.0) == {"rope_theta": 500000.0}
    assert told(rope_parameters=base, rope_theta=500000.0) == {}
    assert told(rope_theta=500000.0) == told() == {}
    assert told(rope_theta=500000.0, rope_scaling={"rope_type": "linear", "factor": 2.0}) == {}


def test_sglang_is_told_the_base_and_the_pattern_of_exaone(tmp_path: Path) -> None:
    """It takes 1e6 where the top of the config has no base, and the length of a word for the period of windows."""

    def told(**keys: Any) -> Any:
        return missing_settings(folder(tmp_path, architectures=["Exaone4ForCausalLM"], num_hidden_layers=4, **keys))

    named = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    published = {"layer_types": named, "sliding_window": 8, "sliding_window_pattern": "LLLG", "rope_theta": 1000000}
    assert told(**published) == {}
    assert told(**published | {"rope_theta": 500.0}) == {"rope_theta": 500.0}
    assert told(**published | {"rope_theta": None, "rope_parameters": {"rope_theta": 7.0}}) == {"rope_theta": 7.0}
    assert told(**published | {"rope_theta": None}) == {"rope_theta": 10000.0}
    for pattern in (4, None):
        assert told(**published | {"sliding_window_pattern": pattern}) == {"sliding_window_pattern": "LLLG"}
    every_second = published | {"layer_types": ["sliding_attention", "full_attention"] * 2}
    assert told(**every_second) == {"sliding_window_pattern": "LG"}
    unnamed = {key: value for key, value in published.items() if key != "layer_types"}
    assert told(**unnamed | {"sliding_window_pattern": 3}) == {"sliding_window_pattern": "LLG"}
    no_window = published | {"layer_types": ["full_attention"] * 4, "sliding_window": None}
    assert told(**no_window) == {"sliding_window_pattern": None}
    assert told(**no_window | {"sliding_window_pattern": None}) == {}


def test_servers_on_devices_are_told_an_attention_with_the_windows_of_exaone(tmp_path: Path) -> None:
    """Without one SGLang ends before its start; what a recipe names comes behind it, and counts."""

    def told(*extra: str, platform: PlatformName = "cuda", **keys: Any) -> list[str]:
        model = folder(tmp_path, architectures=["Exaone4ForCausalLM"], num_hidden_layers=4, **keys)
        words = ServerSpec(model, "bfloat16", extra=extra).words(get_platform(platform), "127.0.0.1", 1)
        return [words[index + 1] for index, word in enumerate(words) if word == "--attention-backend"]

    assert told() == told(sliding_window=8, sliding_window_pattern=2) == ["triton"]
    assert told("--attention-backend", "fa3") == ["triton", "fa3"]
    assert told(platform="cpu") == ["torch_native"]
    assert told(sliding_window=None) == told(sliding_window=None, sliding_window_pattern=None) == []


def test_sglang_is_told_the_limit_that_transformers_has_in_its_code(tmp_path: Path) -> None:
    assert not hasattr(GptOssConfig(), "swiglu_limit")
    assert missing_settings(folder(tmp_path, architectures=["GptOssForCausalLM"])) == {"swiglu_limit": 7.0}


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({}, {}),  # then both have the same default
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 64}}, 64),
        ({"rope_scaling": {"original_max_position_embeddings": 32}}, 32),
        ({"rope_parameters": {"rope_type": "yarn"}, "max_position_embeddings": 128}, 128),
        ({"rope_parameters": {"original_max_position_embeddings": 16}, "original_max_position_embeddings": 8}, {}),
    ],
)
def test_sglang_is_told_after_how_many_tokens_queries_grow(tmp_path: Path, keys: Any, told: Any) -> None:
    found = missing_settings(folder(tmp_path, architectures=["Ministral3ForCausalLM"], **keys))
    assert found == (told if told == {} else {"original_max_position_embeddings": told})
    assert missing_settings(folder(tmp_path, architectures=["MistralForCausalLM"], **keys)) == {}


def test_what_sglang_wants_of_a_config_and_transformers_does_not_write_is_added(tmp_path: Path) -> None:
    """transformers 5 leaves out of DeepSeek-V3's what is the same in all of them."""
    model = folder(tmp_path, architectures=["DeepseekV3ForCausalLM"], moe_layer_freq=2)
    found = missing_settings(model)
    assert found == {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    config = DeepseekV3Config()
    assert not any(hasattr(config, key) for key in server_models.MISSING["DeepseekV3ForCausalLM"])
    flags = ServerSpec(model, "bfloat16").flags("127.0.0.1", 1)
    assert json.loads(flags[flags.index("--json-model-override-args") + 1]) == found
    both = ServerSpec(model, "bfloat16", quantized=True).flags("127.0.0.1", 1)
    assert json.loads(both[both.index("--json-model-override-args") + 1]).keys() == {*found, "quantization_config"}
    assert "--json-model-override-args" not in ServerSpec(tmp_path / "none", "bfloat16").flags("127.0.0.1", 1)
    mine = ("--json-model-override-args", '{"rope_theta": 5, "moe_layer_freq": 3}', "--log-requests")
    merged = ServerSpec(model, "bfloat16", extra=mine).flags("127.0.0.1", 1)
    assert json.loads(merged[merged.index("--json-model-override-args") + 1]) == found | {
        "rope_theta": 5,
        "moe_layer_freq": 3,
    }
    assert merged.count("--json-model-override-args") == 1 and merged[-1] == "--log-requests"
    assert ServerSpec(model, "bfloat16", extra=("=".join(mine[:2]), mine[2])).flags("127.0.0.1", 1) == merged
    for shorter in ("--json", "--json-model-override"):  # argparse takes those as well
        assert ServerSpec(model, "bfloat16", extra=(shorter, *mine[1:])).flags("127.0.0.1", 1) == merged


def test_qwen3_5_that_sees_is_told_what_its_config_leaves_out(tmp_path: Path) -> None:
    """Else SGLang would add features of layers that its tower does not have."""
    text: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    told = missing_settings(folder(tmp_path, **config))
    assert told == {"text_config": {"full_attention_interval": 2}, "vision_config": {"deepstack_visual_indexes": []}}
    text["full_attention_interval"] = 2
    config["vision_config"] = {"deepstack_visual_indexes": []}
    assert missing_settings(folder(tmp_path, **config)) == {}


def test_qwen2_vl_is_told_its_colors_by_the_older_key(tmp_path: Path) -> None:
    config = {"architectures": ["Qwen2VLForConditionalGeneration"]}
    told = missing_settings(folder(tmp_path, **config, vision_config={"in_channels": 3}))
    assert told == {"vision_config": {"in_chans": 3}}
    assert missing_settings(folder(tmp_path, **config, vision_config={"in_chans": 3})) == {}
