"""Packing once more, sample by sample and token by token, in plain Python: what blocks and plans have to come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megarl.core.types import MicroBatch, Sample

FILLER = {
    "tokens": [0],
    "labels": [0],
    "cu_seqlens": [0, 1],
    "loss_mask": [0.0],
    "weights": [0.0],
    "rollout_logprobs": [0.0],
    "sample_index": [-1],
    "routing": None,
}


def slow_shards(
    samples: Sequence[Sample],
    *,
    num_shards: int,
    mini_batch_samples: int,
    micro_batch_tokens: int,
    reduction: str,
    max_response_tokens: int,
) -> list[list[list[dict[str, Any]]]]:
    """[shard][mini-batch][micro-batch], as `plain` writes one."""
    shards: list[list[list[dict[str, Any]]]] = [[] for _ in range(num_shards)]
    for start in range(0, len(samples), mini_batch_samples):
        mini = list(range(start, min(start + mini_batch_samples, len(samples))))
        weights = _weights([samples[index] for index in mini], reduction, max_response_tokens)
        parts = slow_deal([samples[index].num_tokens for index in mini], num_shards, micro_batch_tokens)
        for shard, bins in zip(shards, parts, strict=True):
            shard.append([_micro([(mini[i], samples[mini[i]], weights[i]) for i in sorted(bin_)]) for bin_ in bins])
    return shards


def plain(micro: MicroBatch) -> dict[str, Any]:
    """A micro-batch as lists."""
    return {name: None if getattr(micro, name) is None else getattr(micro, name).tolist() for name in FILLER}


def slow_deal(lengths: Sequence[int], num_shards: int, budget: int) -> list[list[list[int]]]:
    """Items of each micro-batch of each shard."""

    def load(bin_: list[int]) -> int:
        return sum(lengths[item] for item in bin_)

    def to_the_lightest(items: Sequence[int], num_bins: int) -> list[list[int]]:
        bins: list[list[int]] = [[] for _ in range(num_bins)]
        for item in items:
            min(bins, key=load).append(item)
        return bins

    def first_fit(items: Sequence[int]) -> list[list[int]]:
        bins: list[list[int]] = []
        for item in items:
            fitting = [bin_ for bin_ in bins if load(bin_) + lengths[item] <= budget]
            if not fitting:
                bins.append([])
                fitting = bins[-1:]
            fitting[0].append(item)
        return bins

    longest_first = sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
    shards = to_the_lightest(longest_first, num_shards)
    num_micro = max(1, *(len(first_fit(items)) for items in shards))
    found = []
    for items in shards:
        even, packed = to_the_lightest(items, num_micro), first_fit(items)
        fits = all(load(bin_) <= budget for bin_ in even)
        found.append(even if fits else packed + [[] for _ in range(num_micro - len(packed))])
    return found


def _weights(samples: Sequence[Sample], reduction: str, most: int) -> list[float]:
    counts = [int(sample.loss_mask.sum()) for sample in samples]
    groups = [sample.group_id for sample in samples]
    of_group = {group: sum(c for c, g in zip(counts, groups, strict=True) if g == group) for group in groups}
    filled = sum(count > 0 for count in counts)
    filled_groups = sum(count > 0 for count in of_group.values())
    denominators = {
        "token-mean": [sum(counts)] * len(counts),
        "sequence-mean": [count * filled for count in counts],
        "group-mean": [of_group[group] * filled_groups for group in groups],
        "constant": [len(counts) * most] * len(counts),
    }[reduction]
    return [1 / below if count else 0.0 for count, below in zip(counts, denominators, strict=True)]


def _micro(parts: Sequence[tuple[int, Sample, float]]) -> dict[str, Any]:
    if not parts:
        return FILLER
    made: dict[str, Any] = {name: [] for name in FILLER} | {"cu_seqlens": [0]}
    width = max(0 if sample.routing is None else sample.routing.shape[1] for _, sample, _ in parts)
    for index, sample, weight in parts:
        tokens = [*sample.prompt.token_ids.tolist(), *sample.response_ids.tolist()]
        prompt = len(sample.prompt.token_ids)
        for at, token in enumerate(tokens):
            speaks_of = at + 1 - prompt  # the token of the response that this position predicts
            trained = 0 <= speaks_of < len(sample.response_ids) and bool(sample.loss_mask[speaks_of])
            made["tokens"].append(token)
            made["labels"].append(tokens[at + 1] if at + 1 < len(tokens) else 0)
            made["loss_mask"].append(float(trained))
            made["weights"].append(float(np.float32(weight)) if trained else 0.0)
            made["rollout_logprobs"].append(float(sample.rollout_logprobs[speaks_of]) if trained else 0.0)
            if width:
                known = sample.routing is not None and at < len(sample.routing)
                made["routing"].append(sample.routing[at].tolist() if known else [-1] * width)
        made["cu_seqlens"].append(len(made["tokens"]))
        made["sample_index"].append(index)
    if not width:
        made["routing"] = None
    return made
