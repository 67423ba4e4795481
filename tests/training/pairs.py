"""Pairs for the engine's tests: random examples taken two by two, and the ways to cut them into shards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megarl.core.types import Column, MicroBatch, MiniBatch, Shard
from megarl.recipe.supervised import Dpo
from tests.training.samples import Example, to_micro_batch

# How far the chosen one of the pairs shall be ahead, in turn.
MARGINS = (0.0, 0.3, -0.2)


def pairs_of(examples: list[Example]) -> list[tuple[Example, Example]]:
    """Neighbours as (chosen, rejected)."""
    return list(zip(examples[::2], examples[1::2], strict=True))


def margin_of(index: int) -> float:
    """The margin of a mini-batch's pair of that number."""
    return MARGINS[index % len(MARGINS)]


def pair_shards(
    mini: list[Example],
    dp: int = 1,
    micro_batches: int = 1,
    *,
    scored: bool,
    images: list[tuple[bytes, ...]] | None = None,
) -> tuple[list[Shard], list[dict[str, Column]]]:
    """A mini-batch of pairs assigned to dp shards, each cut into micro-batches, and the columns `ref_logprobs` of each.

    scored: the last token is marked in the place of the response. images: of each example.
    """
    numbered = list(enumerate(pairs_of(mini)))
    parts, columns = [], []
    for index in range(dp):
        mine = numbered[index::dp]
        cuts = [mine[first::micro_batches] for first in range(micro_batches)]
        micros = [_pack(cut, len(numbered), scored=scored) for cut in cuts]
        if images is not None:
            shown = [tuple(images[2 * number + side] for number, _ in cut for side in (0, 1)) for cut in cuts]
            micros = [replace(micro, images=its) for micro, its in zip(micros, shown, strict=True)]
        parts.append(Shard((MiniBatch(tuple(micros)),)))
        columns.append({"ref_logprobs": [[_reference(cut) for cut in cuts]]})
    return parts, columns


def preference_loss(
    settings: Dpo, chosen: tuple[Tensor, Tensor], rejected: tuple[Tensor, Tensor], *, margin: float = 0.0
) -> Tensor:
    """The loss of one pair, from the papers' formulas. chosen, rejected: what policy and reference say of each token."""
    beta, smoothing = settings.beta, settings.label_smoothing
    rewards, said = [], []
    for logprobs, reference in (chosen, rejected):
        ratios, mean = logprobs - reference, logprobs.mean()
        said.append(mean)
        likelihood = torch.exp(mean)
        rewards.append(
            {"simpo": beta * mean, "orpo": torch.log(likelihood / (1 - likelihood))}.get(
                settings.loss, beta * (ratios.mean() if settings.length_normalized else ratios.sum())
            )
        )
    better, worse = rewards
    lead = better - worse - margin - settings.margin
    right, wrong = (torch.log(torch.sigmoid(each)) for each in (lead, -lead))
    sigmoid = -(1 - smoothing) * right - smoothing * wrong
    found = {
        "sigmoid": sigmoid,
        "simpo": sigmoid,
        "orpo": beta * sigmoid,
        "robust": -((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing),
        "hinge": torch.clamp(1 - lead, min=0),
        "ipo": (lead / beta - 1 / (2 * beta)) ** 2,
        "apo_zero": 1 - torch.sigmoid(better) + torch.sigmoid(worse),
        "apo_down": torch.sigmoid(better) + 1 - torch.sigmoid(lead),
    }[settings.loss]
    return found - (1 if settings.loss == "orpo" else settings.sft_coef) * said[0]


def _pack(cut: list[tuple[int, tuple[Example, Example]]], num_pairs: int, *, scored: bool) -> MicroBatch:
    sides = [side for _, pair in cut for side in pair]
    masks = [_last(side) if scored else side.mask for side in sides]
    weights = [mask / max(1, mask.sum()) / (2 * num_pairs) for mask in masks]
    return replace(
        to_micro_batch(sides, 1.0),
        loss_mask=np.concatenate(masks),
        weights=np.concatenate(weights).astype(np.float32),
        margins=np.array([margin_of(number) for number, _ in cut], np.float32),
    )


def _last(side: Example) -> np.ndarray:
    mask = np.zeros_like(side.mask)
    mask[-1] = 1
    return mask


def _reference(cut: list[tuple[int, tuple[Example, Example]]]) -> np.ndarray:
    return np.concatenate([side.columns["ref_logprobs"] for _, pair in cut for side in pair])
