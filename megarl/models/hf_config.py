"""What megarl needs to know of a model, read from an HF folder's config.json. Without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megarl.core.errors import UserError


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


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model. Sizes are counts of elements; `ffn_hidden_size` is of one of the two gated halves."""

    family: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]

    def padded_vocab_size(self, tp: int) -> int:
        """Vocabulary rounded up to a multiple of the tensor-parallel size."""
        return -(-self.vocab_size // tp) * tp


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
    if raw.get("attention_bias") and not family.qkv_bias:
        raise UserError(f"{path}: attention_bias is not supported for {architecture}.")
    heads = int(raw["num_attention_heads"])
    eos = raw.get("eos_token_id")
    return ModelConfig(
        family=family.name,
        architecture=architecture,
        num_layers=int(raw["num_hidden_layers"]),
        hidden_size=int(raw["hidden_size"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
        ffn_hidden_size=int(raw["intermediate_size"]),
        vocab_size=int(raw["vocab_size"]),
        max_positions=int(raw["max_position_embeddings"]),
        rope_theta=_rope_theta(raw, path),
        norm_eps=float(raw["rms_norm_eps"]),
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


def _rope_theta(raw: Mapping[str, Any], path: Path) -> float:
    # transformers 5 writes `rope_parameters`; earlier ones `rope_theta` beside `rope_scaling`.
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise UserError(f"{path}: RoPE scaling of type {kind!r} is not supported; only models without scaling are.")
    return float(parameters.get("rope_theta", raw.get("rope_theta", 10000.0)))


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
