"""What a server has to be told of its model beside the folder: which of SGLang's 200 files of models it need not load (they are
read, not imported), and what SGLang reads in a config and not every writer of it writes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megarl.models.hf_delta import INTERVAL, LINEAR
from megarl.models.hf_layers import PATTERN, SLIDING, period_of
from megarl.models.multimodal import sees

VARIABLE = "SGLANG_DISABLED_MODEL_ARCHS"  # SGLang's own: modules of sglang.srt.models that are not imported
ENTRY = re.compile(r"^EntryClass\b[^=]*=\s*(\[[^\]]*\]|[^\n]+)", re.MULTILINE)  # what a module registers
# Of configs as transformers 5 writes them (SGLang 0.5.21, models/deepseek_v2.py): experts in each layer behind the dense ones;
# and (models/gpt_oss.py) the limit that transformers has in its code.
MISSING: dict[str, dict[str, object]] = {
    "DeepseekV3ForCausalLM": {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "DeepseekV2ForCausalLM": {
        **{"moe_layer_freq": 1, "topk_method": "greedy", "scoring_func": "softmax"},
        **{"norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    },
    "GptOssForCausalLM": {"swiglu_limit": 7.0},
    "HunYuanDenseV1ForCausalLM": {"use_qk_norm": True},
    "HunYuanMoEV1ForCausalLM": {"use_qk_norm": True, "use_mixed_mlp_moe": True, "num_shared_expert": 1},
    "MiniMaxM2ForCausalLM": {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True},
}
# By whose first context queries grow: where it is not at the top, SGLang takes 16384 (models/ministral3.py), and transformers
# that of the RoPE, or the whole context.
BY_POSITION, ORIGINAL = "Ministral3ForCausalLM", "original_max_position_embeddings"
# Of whose rotated share of a head SGLang reads the key at the top alone (models/llama.py), and transformers another first.
ROTATED, SHARE = "Phi3ForCausalLM", "partial_rotary_factor"
# Of which SGLang reads how many elements of a head are rotated, and transformers the share (models/minimax_m2.py).
COUNTED, WIDTH, HEAD_DIM = "MiniMaxM2ForCausalLM", "rotary_dim", 128
# Of whose experts SGLang wants the width by a key of its own (models/hunyuan.py).
SIZED, EXPERT_WIDTH = "HunYuanMoEV1ForCausalLM", "moe_intermediate_size"
# Whose dense layers transformers 5 names one by one, and SGLang counts (models/glm4_moe_lite.py).
DENSE_BY_NAME = "Glm4MoeLiteForCausalLM"
# What SGLang builds an architecture as, where it registers another name (configs/olmo3.py), or none (models/transformers.py).
BUILT_AS = {
    "Olmo3ForCausalLM": "Olmo2ForCausalLM",
    "SmolLM3ForCausalLM": "TransformersForCausalLM",
    "SeedOssForCausalLM": "TransformersForCausalLM",
}
# Whose heads' width transformers leaves to hidden_size and the number of heads, where SGLang on a CPU may change that number.
UNSAID_WIDTH = ("ApertusForCausalLM", "Ernie4_5_MoeForCausalLM")
# What SGLang has of its own by another name than transformers (models/ernie4.py), and is told; else transformers' code serves it.
RENAMED = {"Ernie4_5ForCausalLM": "Ernie4_5_ForCausalLM"}
# Whose rope_parameters, as transformers 5 writes them, SGLang drops (configs/olmo3.py).
DROPPED, THETA = "Olmo3ForCausalLM", "rope_theta"
# Of which SGLang reads the base at the top alone, where transformers 5 leaves none, and a period of windows in words alone
# (models/exaone4.py).
HYBRID, HYBRID_THETA, PERIOD = "Exaone4ForCausalLM", 1e6, 4
# Of whose layers with full attention SGLang reads the period alone, and transformers 5 writes the kind of each layer
# (configs/qwen3_next.py): without it a server ends as it builds the model. Where no key says, transformers takes PERIOD.
DELTA = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM")
# Which have it in their text part's; and whose tower SGLang gives the layers of Qwen3-VL's that features are taken behind where
# no key says that there are none (configs/qwen3_vl.py), as transformers 5 writes none.
SEEING_DELTA = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
DEEPSTACK = "deepstack_visual_indexes"
# Of whose tower SGLang reads how many colors there are by the older key alone, and ends without it (models/qwen2_vl.py).
COLORED, CHANNELS = "Qwen2VLForConditionalGeneration", "in_chans"
# Whose experts in 16 bits SGLang lays out anew on Blackwell as it loads them, and then takes no weights as they are sent
# (arg_groups/overrides.py, arg_groups/model_overrides: flashinfer_trtllm). On other devices their kernels are Triton's anyway.
LAID_OUT_ANEW = (
    *("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"),
    *("Qwen3VLMoeForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
)
ROUTING = "--enable-return-routed-experts"  # a server tells which experts it chose
# How a user's flags begin that say by which kernels experts are computed, or on what.
CHOSEN = ("--moe-", "--quantization")
# Whose heads' sizes SGLang reads as those of layers without a window, and those of the others by keys of its own: of a multimodal
# folder's config it moves them itself (utils/hf_transformers/config.py), of a text part's it does not.
LAYERED = "Gemma4ForCausalLM"
# What servers of models that see are told of how images come.
SEES = "--enable-multimodal"
IMAGE_FLAGS = (
    SEES,
    # transformers' code without torchvision, which the trainer's pixels come by as well; the other takes a device's memory.
    *("--image-processor-backend", "pil"),
    # Images come at the size that is the model's: it decided how many tokens the prompt has.
    *("--mm-process-config", '{"image": {"do_resize": false}}'),
    # Squares of an image for all samples of its prompt, in the host's memory. An image of 10,000 tokens has 190 MiB of them.
    *("--mm-preprocess-cache-size-mb", "512"),
    # Else Qwen3-VL's on Hopper take 1 GiB and more of a device for what is on its way there.
    *("--mm-feature-transport", "cpu"),
)
# A server that gives the memory of its weights back gets those of the text from the trainer, and of the rest has a copy.
KEPT_WEIGHTS = "--enable-weights-cpu-backup"
KEPT_DRAFT = "--enable-draft-weights-cpu-backup"
# SGLang's own: a prompt's tokens are those that were sent; and MiB of a device for what the tower said, for prompts that are cut
# into chunks and for samples that begin later: of 10,000 tokens of 4096 numbers it is 80, and of Qwen3-VL four times that.
SEEN_MB = "SGLANG_VLM_CACHE_SIZE_MB"
IMAGE_ENV = {"SGLANG_MM_AVOID_RETOKENIZE": "1", SEEN_MB: "512"}
# Of a tower that learns nothing is kept: SGLang knows what it said by the image alone, and goes on with it when other weights
# have come and its caches have been flushed (0.5.21, managers/mm_schedule.py: embedding_cache).
NOT_KEPT = {SEEN_MB: "0"}
# Of which SGLang reads RoPE's base and share at the top alone, and else takes 10000 and a quarter (models/qwen3_next.py).
AT_TOP, QUARTER = "Qwen3NextForCausalLM", 0.25


def missing_settings(model: Path) -> dict[str, object]:
    """What the config of this HF folder lacks and SGLang wants of its architecture, as transformers understands it."""
    config = _config(model)
    names = config.get("architectures") or ()
    wanted = {key: value for name in names for key, value in MISSING.get(name, {}).items()}
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if BY_POSITION in names and rope:
        wanted[ORIGINAL] = rope.get(ORIGINAL, config.get("max_position_embeddings"))
    if any(name in UNSAID_WIDTH for name in names) and config.get("num_attention_heads"):
        wanted["head_dim"] = config.get("hidden_size", 0) // config["num_attention_heads"]
    if SIZED in names:
        wanted[EXPERT_WIDTH] = config.get("intermediate_size")
    if DENSE_BY_NAME in names:
        kinds = config.get("mlp_layer_types") or ["dense", "sparse"]
        wanted["first_k_dense_replace"] = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if COUNTED in names:
        wanted[WIDTH] = int(rope.get(SHARE, config.get(SHARE, 1.0)) * config.get("head_dim", HEAD_DIM))
    missing = {key: value for key, value in wanted.items() if config.get(key) is None}
    if ROTATED in names:
        share = rope.get(SHARE, config.get(SHARE, 1.0))
        share = 1.0 if share is None else share
        missing |= {} if share == config.get(SHARE, 1.0) else {SHARE: share}
    if DROPPED in names and not config.get("rope_scaling"):
        theta = (config.get("rope_parameters") or {}).get(THETA, config.get(THETA))
        missing |= {} if theta == config.get(THETA) else {THETA: theta}
    if any(name in DELTA for name in names):
        missing |= _of_delta(config, rope if AT_TOP in names else {})
    if any(name in SEEING_DELTA for name in names):
        missing |= _of_seeing_delta(config)
    if COLORED in names and CHANNELS not in (vision := config.get("vision_config") or {}):
        missing["vision_config"] = {CHANNELS: vision.get("in_channels", 3)}
    if LAYERED in names:
        missing |= _of_heads(config)
    if any(name in RENAMED for name in names):
        missing["architectures"] = [RENAMED.get(name, name) for name in names]
    return missing | (_of_hybrid(config) if HYBRID in names else {})


def known_as(built: str) -> str:
    """What a config.json calls the architecture that SGLang knows by this name."""
    return next((name for name, theirs in RENAMED.items() if theirs == built), built)


def _of_delta(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, object]:
    """Which layers have full attention, and what of the RoPE stands in its object alone."""
    kinds = config.get("layer_types")
    linear = frozenset(index for index, kind in enumerate(kinds or ()) if kind == LINEAR)
    period = period_of(linear, len(kinds)) if kinds else config.get(INTERVAL, PERIOD)
    told: dict[str, object] = {} if period in (None, config.get(INTERVAL)) else {INTERVAL: period}
    unsaid = {THETA: None, SHARE: QUARTER}
    at_top = {key: config.get(key, value) for key, value in unsaid.items()}
    return told | {key: rope[key] for key, value in at_top.items() if rope.get(key, value) != value}


def _of_seeing_delta(config: dict[str, Any]) -> dict[str, object]:
    """The same of the text part, and that features come from the end of the tower alone."""
    of_text = _of_delta(config.get("text_config") or {}, {})
    told: dict[str, object] = {"text_config": of_text} if of_text else {}
    return told if DEEPSTACK in (config.get("vision_config") or {}) else told | {"vision_config": {DEEPSTACK: []}}


def _of_heads(config: dict[str, Any]) -> dict[str, object]:
    """The heads of layers without a window, by the keys of all; and those of the others, by SGLang's."""
    local, local_kv = config.get("head_dim", 256), config.get("num_key_value_heads")
    width = config.get("global_head_dim", 512)
    kv = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else local_kv
    return {
        **{"head_dim": width, "v_head_dim": width, "num_key_value_heads": kv},
        **{"swa_head_dim": local, "swa_v_head_dim": local, "swa_num_key_value_heads": local_kv},
    }


def attention_flags(model: Path) -> tuple[str, ...]:
    """The attention that devices' servers are told where the model has windows that SGLang keeps to with some kernels alone.

    It ends before its start where none of them is named (0.5.21, arg_groups/model_hook.py): of these Triton's is for all devices.
    """
    config = _config(model)
    if HYBRID not in (config.get("architectures") or ()):
        return ()
    pattern = _of_hybrid(config).get(PATTERN, config.get(PATTERN, PERIOD))
    return () if pattern is None else ("--attention-backend", "triton")


def expert_flags(model: Path, extra: Sequence[str], *, quantized: bool) -> tuple[str, ...]:
    """The kernels of experts that devices' servers are told, where those that SGLang may choose do not do.

    No weights can be sent to some; some choose the experts themselves, and servers tell of 0 for every choice (0.5.21,
    layers/moe/topk.py: of the standard form alone it keeps which). extra: other flags, by which a user may want others.
    quantized: weights come in FP8, which lie as they come by all kernels.
    """
    names = _config(model).get("architectures") or ()
    laid_out = not quantized and any(name in LAID_OUT_ANEW for name in names)
    if any(word.startswith(CHOSEN) for word in extra) or not (laid_out or ROUTING in extra):
        return ()
    return ("--moe-runner-backend", "triton")


def _of_hybrid(config: dict[str, Any]) -> dict[str, object]:
    """What SGLang would take otherwise: the base, and which layers have windows and positions. No pattern: all have these."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = rope.get(THETA) or config.get(THETA) or 1e4
    told: dict[str, object] = {} if theta == HYBRID_THETA else {THETA: theta}
    layers, pattern = config.get("num_hidden_layers", 0), None
    if config.get("sliding_window", 0) is not None:
        kinds = config.get("layer_types")
        local = frozenset(index for index, kind in enumerate(kinds or ()) if kind == SLIDING)
        period = period_of(local, layers) if kinds else config.get(PATTERN, PERIOD)
        pattern = config.get(PATTERN) if period is None else "L" * (period - 1) + "G"
    return told if pattern == config.get(PATTERN, PERIOD) else told | {PATTERN: pattern}


def sees_images(model: Path) -> bool:
    """Whether a server of this HF folder has a vision tower that megarl gives images to."""
    return sees(_config(model).get("architectures") or ())


def image_flags(model: Path) -> tuple[str, ...]:
    """What a server is told of how images come; nothing of a model without a tower."""
    return IMAGE_FLAGS if sees_images(model) else ()


def image_env(model: Path, *, tower_learns: bool = False) -> dict[str, str]:
    """Variables of such a server; a user's own go before, but where they would have it answer with an old tower's features."""
    if not sees_images(model):
        return {}
    found = {name: os.environ.get(name, value) for name, value in IMAGE_ENV.items()}
    return found | NOT_KEPT if tower_learns else found


def max_positions(model: Path) -> int:
    """How many tokens the config of this HF folder says that the model takes; 0 where it does not."""
    config = _config(model)
    text = config.get("text_config") or {}
    return int(config.get("max_position_embeddings") or text.get("max_position_embeddings") or 0)


def unused_models(model: Path) -> tuple[str, ...]:
    """Names of SGLang's modules that register no architecture of this HF folder.

    None where no module registers one: what SGLang makes of such a model is for it to say, with all that it has.
    """
    built = BUILT_AS | RENAMED
    wanted = {built.get(name, name) for name in _config(model).get("architectures") or ()}
    known = _known()
    used = {name for name, registered in known.items() if registered & wanted}
    return tuple(sorted(set(known) - used)) if used else ()


def _config(model: Path) -> dict[str, Any]:
    file = model / "config.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


@cache
def _known() -> dict[str, set[str]]:
    """Of each of SGLang's modules the architectures that it registers."""
    return {file.stem: _registered(file) for file in _folder().glob("*.py")}


def _registered(file: Path) -> set[str]:
    text = file.read_text()
    at = text.find("\nEntryClass")  # much faster than the expression, which tries every line
    found = ENTRY.search(text, at) if at >= 0 else None
    return set(re.findall(r"\w+", found[1])) if found else set()


def _folder() -> Path:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations, "the package sglang is not installed"
    return Path(spec.submodule_search_locations[0]) / "srt" / "models"
