"""Folders of small random models for a profile: a Qwen3 of given sizes, written without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from megarl.models.config import ModelConfig
from megarl.models.hf_config import parse_model_config
from megarl.models.rules import expected_tensors

MAX_POSITIONS = 4096
SPREAD = 0.02


@dataclass(frozen=True)
class Size:
    """Layers, width, vocabulary and width of a head of a reference model; the MLP is three times as wide."""

    layers: int
    hidden: int
    vocab: int
    head_dim: int = 32

    @property
    def config(self) -> ModelConfig:
        """As it is read of the folder."""
        return parse_model_config(_config(self), Path("config.json"))


def write_reference_model(folder: Path, size: Size) -> Path:
    """Config, random float32 weights and a tokenizer of numbers, as an HF folder; returns it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_config(size), indent=1))
    random = np.random.default_rng(0)
    tensors = {
        # Norms, the only vectors, stand at one.
        name: np.ones(shape, np.float32) if len(shape) == 1 else random.standard_normal(shape, np.float32) * SPREAD
        for name, shape in expected_tensors(size.config).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder, size.vocab)
    return folder


def _config(size: Size) -> dict[str, Any]:
    heads = size.hidden // size.head_dim
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "num_hidden_layers": size.layers,
        "hidden_size": size.hidden,
        "intermediate_size": 3 * size.hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": size.head_dim,
        "vocab_size": size.vocab,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": size.vocab - 1,
    }


def _write_tokenizer(folder: Path, vocab: int) -> None:
    words = {str(index): index for index in range(vocab)}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": str(vocab - 1), "unk_token": "0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
