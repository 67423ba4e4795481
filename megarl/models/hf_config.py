"""What megarl needs to know of a model, read from an HF folder's config.json. Without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megarl.core.errors import UserError
from megarl.models.config import ModelConfig, Rope


@dataclass(frozen=True)
class Family:
    """What all models of an HF architecture share: data, so that a family is a row and not a code path."""

    name: str
    qkv_bias: bool
    qk_norm: bool


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, qk_norm=False),
        "Qwen3ForCausalLM": Family("qwen3", qkv_bias=False, qk_norm=True),
        "LlamaForCausalLM": Family("llama", qkv_bias=False, qk_norm=False),
    }
)

# What a config may ask for beside its family, and the one answer that the Megatron model gives to it.
ONLY: Mapping[str, tuple[Any, str]] = MappingProxyType(
    {
        "hidden_act": ("silu", "another activation"),
        "use_sliding_window": (False, "sliding-window attention"),
        "mlp_bias": (False, "biases in the MLP"),
        "partial_rotary_factor": (1.0, "RoPE over a part of each head"),
        "quantization_config": (None, "quantised weights"),
    }
)


def load_model_config(folder: Path) -> ModelConfig:
    """Read config.json and check that the folder is whole.

    Raises UserError: the folder, its config, tokenizer or weights are missing; the architecture is not supported.
    """
    _check_folder(folder)
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}. Export the model again.") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds {type(raw).__name__}, not a JSON object. Export the model again.")
    return parse_model_config(raw, path)


def parse_model_config(raw: Mapping[str, Any], path: Path) -> ModelConfig:
    """A config.json's content as a ModelConfig; `path` is named in errors."""
    architectures = raw.get("architectures") or []
    architecture = next((name for name in architectures if name in FAMILIES), None)
    if architecture is None:
        raise UserError(
            f"{path}: architecture {architectures or 'missing'} is not supported. Supported: {', '.join(FAMILIES)}."
        )
    family = FAMILIES[architecture]
    missing = [key for key in _REQUIRED if key not in raw]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}: it is not a whole config of {architecture}.")
    _check_features(raw, path, architecture)
    heads = _count(raw, path, "num_attention_heads")
    kv_heads = _count(raw, path, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UserError(f"{path}: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}.")
    hidden = _count(raw, path, "hidden_size")
    eos = raw.get("eos_token_id")
    return ModelConfig(
        family=family.name,
        architecture=architecture,
        num_layers=_count(raw, path, "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_count(raw, path, "head_dim", hidden // heads),
        ffn_hidden_size=_count(raw, path, "intermediate_size"),
        vocab_size=_count(raw, path, "vocab_size"),
        max_positions=_count(raw, path, "max_position_embeddings"),
        rope=Rope(_rope_theta(raw, path)),
        norm_eps=_number(path, "rms_norm_eps", raw["rms_norm_eps"]),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
    )


def check_tensor_parallel(config: ModelConfig, tp: int) -> None:
    """Raise UserError, with the nearest sizes that work, when the model cannot be cut in `tp` parts."""
    sizes = {
        "attention heads": config.num_heads,
        "key-value heads": config.num_kv_heads,
        "MLP columns": config.ffn_hidden_size,
    }
    uneven = [f"{size} {what}" for what, size in sizes.items() if size % tp]
    if uneven:
        valid = [
            size for size in range(1, config.num_kv_heads + 1) if all(count % size == 0 for count in sizes.values())
        ]
        raise UserError(
            f"actor.parallel.tp={tp} does not divide the model's {', '.join(uneven)}. "
            f"Tensor parallel sizes that work for this model: {', '.join(map(str, valid))}."
        )


_REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)


def _check_features(raw: Mapping[str, Any], path: Path, architecture: str) -> None:
    """Raise UserError for what the family's models may have and megarl's do not: they would train on other numbers."""
    rope = raw.get("rope_parameters") or {}
    asked = [
        f"{key}={value!r} ({what})"
        for key, (only, what) in ONLY.items()
        if (value := raw.get(key, rope.get(key))) is not None and value != only
    ]
    if raw.get("attention_bias") and not FAMILIES[architecture].qkv_bias:
        asked.append("attention_bias=True (biases in attention)")
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        asked.append("layer_types other than full_attention")
    if asked:
        raise UserError(f"{path}: {', '.join(asked)} is not supported for {architecture}. Use a model without it.")


def _count(raw: Mapping[str, Any], path: Path, key: str, default: int | None = None) -> int:
    value = default if raw.get(key) is None else raw[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{path}: {key} is {value!r}; a whole number of at least 1 is wanted. Export the model again.")
    return value


def _number(path: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise UserError(f"{path}: {key} is {value!r}; a number over 0 is wanted. Export the model again.")
    return float(value)


def _rope_theta(raw: Mapping[str, Any], path: Path) -> float:
    # transformers 5 writes `rope_parameters`; earlier ones `rope_theta` beside `rope_scaling`.
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise UserError(f"{path}: RoPE scaling of type {kind!r} is not supported; only models without scaling are.")
    return _number(path, "rope_theta", parameters.get("rope_theta", raw.get("rope_theta", 10000.0)))


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"The model folder {folder} does not exist. Set model.path to a folder in HF format.")
    wanted = {
        "config.json": ("config.json",),
        "a tokenizer (tokenizer.json or tokenizer_config.json)": ("tokenizer.json", "tokenizer_config.json"),
        "weights (*.safetensors)": ("*.safetensors",),
    }
    missing = [what for what, patterns in wanted.items() if not any(any(folder.glob(each)) for each in patterns)]
    if missing:
        raise UserError(
            f"The model folder {folder} has no {' and no '.join(missing)}. It must be a whole HF folder, as "
            "save_pretrained of the model and of its tokenizer write it."
        )
