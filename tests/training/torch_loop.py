"""The same training written by hand over transformers: one sequence at a time, plain torch, nothing of megarl."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tests.training.samples import TOP_K, Example

KL_COEF, ENTROPY_COEF, CLIP_LOW, CLIP_HIGH, TEMPERATURE = 0.05, 0.01, 0.2, 0.3, 0.8


def load(folder: Path) -> torch.nn.Module:
    """The HF model in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def scores(model: torch.nn.Module, example: Example, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of the labels and entropy: [T], [T]."""
    logits = model(input_ids=torch.tensor(example.tokens)[None]).logits[0].float() / temperature
    logp = torch.log_softmax(logits, dim=-1)
    return logp.gather(1, torch.tensor(example.labels)[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def loss(model: torch.nn.Module, mini: list[Example]) -> Tensor:
    """GRPO with KL (k3) and entropy bonus, mean over the trained tokens of the mini-batch."""
    total = torch.zeros(())
    for example in mini:
        logprobs, entropy = scores(model, example, TEMPERATURE)
        old, ref, advantage = (
            torch.tensor(example.columns[name]) for name in ("old_logprobs", "ref_logprobs", "advantages")
        )
        ratio = torch.exp(logprobs - old)
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        policy = -torch.minimum(ratio * advantage, clipped * advantage)
        kl = torch.exp(ref - logprobs) - (ref - logprobs) - 1
        total = total + ((policy + KL_COEF * kl - ENTROPY_COEF * entropy) * torch.tensor(example.mask)).sum()
    return total / sum(float(example.mask.sum()) for example in mini)


def whole(model: torch.nn.Module, example: Example) -> Tensor:
    """Log-probs of the whole vocabulary: [T, V]."""
    logits = model(input_ids=torch.tensor(example.tokens)[None]).logits[0].float() / TEMPERATURE
    return torch.log_softmax(logits, dim=-1)


def distill_top(model: torch.nn.Module, mini: list[Example], beta: float) -> Tensor:
    """Generalized Jensen-Shannon divergence from the column teacher_top, mean over trained tokens: on whole distributions."""
    total = torch.zeros(())
    for example in mini:
        logp, column = whole(model, example), torch.tensor(example.columns["teacher_top"])
        ids, theirs = column[:, :TOP_K].long(), column[:, TOP_K:].exp()
        mine = logp.gather(1, ids).exp()
        mine = torch.cat([mine, 1 - mine.sum(1, keepdim=True)], dim=1)
        if beta == 0:
            apart = theirs * (theirs / mine).log()
        elif beta == 1:
            apart = mine * (mine / theirs).log()
        else:
            middle = beta * theirs + (1 - beta) * mine
            apart = beta * theirs * (theirs / middle).log() + (1 - beta) * mine * (mine / middle).log()
        total = total + (apart.sum(1) * torch.tensor(example.mask)).sum()
    return total / sum(float(example.mask.sum()) for example in mini)


def train(
    model: torch.nn.Module,
    mini_batches: list[list[Example]],
    *,
    lrs: list[float],
    weight_decay: float,
    clip_grad: float,
) -> tuple[list[float], list[float]]:
    """AdamW with betas 0.9 and 0.95, eps 1e-6; returns losses and gradient norms before clipping, one a step."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-6,
    )
    losses, norms = [], []
    for mini, lr in zip(mini_batches, lrs, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        value = loss(model, mini)
        value.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad)))
        optimizer.step()
        losses.append(value.item())
    return losses, norms
