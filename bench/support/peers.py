"""What both sides of a comparison with another library are given: prompts, a reward, a model that ends responses by chance."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tools.make_arithmetic import make_arithmetic
from tools.make_tiny_model import END, make_tiny_model, make_tokenizer

PROBES = 64  # random sequences that the end's probability is set on


@dataclass(frozen=True)
class Size:
    """hidden, layers, heads, kv_heads: of the model. mean, longest: tokens of a response. prompts, samples, steps: of a run."""

    hidden: int = 384
    layers: int = 7
    heads: int = 12
    kv_heads: int = 4
    mean: int = 300
    longest: int = 768
    prompts: int = 8
    samples: int = 8
    steps: int = 5


def reward(prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
    """Costs nothing and differs within a group."""
    return (sum(map(ord, response)) % 7) / 6


def make_model(folder: Path, size: Size) -> int:
    """A random model that ends a response after each token with the same probability, 1 / mean; its parameter count.

    One channel of its residual stream is constant, and the head's row of the end of a response reads nothing else.
    """
    count = make_tiny_model(
        folder,
        hidden_size=size.hidden,
        layers=size.layers,
        heads=size.heads,
        kv_heads=size.kv_heads,
        context=size.longest + 64,
    )
    weights: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    end = make_tokenizer().convert_tokens_to_ids(END)
    # What no layer writes stays as the embedding made it.
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0.0
    embedding[:, 0] = 1.0
    head = embedding.clone()
    head[:, 0] = 0.0
    head[end] = 0.0
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    for value in (0.0, _end_row(folder, {**weights, "lm_head.weight": head}, end, size)):
        head[end, 0] = value
        save_file({**weights, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    return count + head.numel()


def _end_row(folder: Path, weights: dict[str, torch.Tensor], end: int, size: Size) -> float:
    """What the end's row has to hold for its mean probability to be 1 / mean, on random sequences."""
    from transformers import AutoModelForCausalLM

    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, end - 2, (PROBES, 64), generator=generator)
    with torch.no_grad():
        hidden = model.model(input_ids=tokens).last_hidden_state
        logits = model.lm_head(hidden)
    logits[..., end] = -math.inf
    others = logits.logsumexp(-1)
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        ended = torch.sigmoid(hidden[..., 0] * middle - others).mean()
        low, high = (middle, high) if ended < 1 / size.mean else (low, middle)
    return (low + high) / 2


def make_prompts(folder: Path, size: Size) -> Path:
    """Prompts for all steps, one JSON object a line."""
    folder.mkdir(parents=True, exist_ok=True)
    make_arithmetic(folder, num_train=size.prompts * size.steps, num_eval=1, num_sft=1)
    return folder / "train.jsonl"
