"""Megarl's logits and transformers' on the same packed tokens. Import after Megatron is prepared."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.models.packed import packed_params
from tests.support.olmo import unscale_local_layers

LENGTHS = (7, 1, 33, 20)


def packed_tokens(vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [T], positions [T], bounds [S + 1] of sequences of LENGTHS."""
    tokens = torch.randint(1, vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    tokens[2::9] = 0  # the padding, whose embedding transformers does not train
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return tokens, positions, torch.tensor([0, *LENGTHS]).cumsum(0).int()


def packed_on(model: torch.nn.Module, vocab_size: int) -> list[Tensor]:
    """The same where the model is."""
    return [tensor.to(next(model.parameters()).device) for tensor in packed_tokens(vocab_size)]


def megatron_logits(model: torch.nn.Module, vocab_size: int) -> Tensor:
    """[T, this rank's columns] float32 on the host, the sequences packed into one pass."""
    tokens, positions, bounds = packed_on(model, vocab_size)
    with torch.no_grad():
        logits: Tensor = model(tokens[None], positions[None], None, packed_seq_params=packed_params(bounds))[0]
    return logits.float().cpu()


def transformers_logprobs(folder: Path, vocab_size: int, weights: torch.dtype = torch.float32) -> Tensor:
    """[T, vocabulary], natural log, each sequence in a pass of its own; in float32 on the host, of weights rounded to a dtype."""
    model = unscale_local_layers(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    parts = packed_tokens(vocab_size)[0].split(LENGTHS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(weights))
        return torch.cat([model(part[None]).logits[0] for part in parts]).log_softmax(-1)
