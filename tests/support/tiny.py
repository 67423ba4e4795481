"""Small random models in HF format, written by transformers itself: the independent side of every parity test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    set_seed,
)

CONFIGS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>")
WORDS = (
    "system",
    "user",
    "assistant",
    *"0123456789",
    *"abcdefghijklmnopqrstuvwxyz",
    *"ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    *"+-*/=#?!.,:",
)


def write_tiny_qwen(
    folder: Path, family: str = "qwen3", *, seed: int = 0, tokenizer: bool = True, **overrides: Any
) -> Path:
    """Write a random model of that family and, if asked for, a tokenizer of one token a character; returns the folder."""
    settings: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
        **overrides,
    }
    if family == "qwen2":
        settings.pop("head_dim")
    set_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](**settings), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms of one and biases of zero would hide mistakes.
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """One token a character, after the special ones."""
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys([*SPECIAL, *WORDS]))}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|pad|>", unk_token="<|unk|>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
