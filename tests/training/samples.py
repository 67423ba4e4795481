"""Random samples and the ways to cut them into shards: the same samples, whatever the cut."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megarl.core.types import Column, MicroBatch, MiniBatch, Shard

TOP_K = 3
COLUMNS = ("old_logprobs", "ref_logprobs", "advantages", "teacher_top")


@dataclass(frozen=True)
class Example:
    """One sequence, label-aligned, with everything that a policy loss reads."""

    tokens: np.ndarray
    labels: np.ndarray
    mask: np.ndarray
    rollout_logprobs: np.ndarray
    columns: dict[str, np.ndarray]


def examples(lengths: list[int], vocab_size: int, seed: int = 0, *, taught: bool = True) -> list[Example]:
    """One example for each length; its second half is the response. Old log-probs are near those of a random model.

    taught: with the column of a teacher, which sorts as many numbers a token as the vocabulary has: seconds, where it is real.
    """
    random = np.random.default_rng(seed)
    made = []
    for length in lengths:
        tokens = random.integers(1, vocab_size, size=length)
        tokens[1::8] = 0  # the padding, whose embedding transformers does not train
        mask = np.zeros(length, np.float32)
        mask[length // 2 : max(0, length - 1)] = 1
        old = (-np.log(vocab_size) + 0.2 * random.standard_normal(length)).astype(np.float32) * mask
        columns = {
            "old_logprobs": old,
            "ref_logprobs": (old + 0.1 * random.standard_normal(length).astype(np.float32)) * mask,
            "advantages": np.float32(random.standard_normal()) * mask,
        }
        if taught:
            columns["teacher_top"] = likeliest(length, vocab_size, seed)
        rollout = (old + 0.01 * random.standard_normal(length).astype(np.float32)) * mask
        made.append(Example(tokens, np.append(tokens[1:], 0)[:length], mask, rollout, columns))
    return made


def likeliest(length: int, vocab_size: int, seed: int) -> np.ndarray:
    """What a random teacher says of its TOP_K likeliest tokens and of all others, [length, 2 TOP_K + 1]: ids, then log-probs."""
    random = np.random.default_rng([seed, length])
    logits = 2 * random.standard_normal((length, vocab_size))
    logprobs = -np.sort(-(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))), axis=1)
    ids, rest = np.argsort(-logits, axis=1)[:, :TOP_K], np.log(np.exp(logprobs[:, TOP_K:]).sum(axis=1, keepdims=True))
    return np.hstack([ids, logprobs[:, :TOP_K], rest]).astype(np.float32)


def shards(
    mini_batches: list[list[Example]], dp: int = 1, micro_batches: int = 1
) -> tuple[list[Shard], list[dict[str, Column]]]:
    """Deal each mini-batch to dp shards, each cut into micro-batches; weights are token-mean over the mini-batch."""
    parts: list[list[MiniBatch]] = [[] for _ in range(dp)]
    given = [name for name in COLUMNS if all(name in each.columns for mini in mini_batches for each in mini)]
    columns: list[dict[str, Column]] = [{name: [] for name in given} for _ in range(dp)]
    for mini in mini_batches:
        denominator = sum(example.mask.sum() for example in mini)
        for index in range(dp):
            mine = mini[index::dp]
            cuts = [mine[first::micro_batches] for first in range(micro_batches) if mine[first::micro_batches]]
            parts[index].append(MiniBatch(tuple(to_micro_batch(cut, denominator) for cut in cuts)))
            for name, column in columns[index].items():
                column.append([np.concatenate([example.columns[name] for example in cut]) for cut in cuts])
    return [Shard(tuple(part)) for part in parts], columns


def to_micro_batch(mine: list[Example], denominator: float) -> MicroBatch:
    """Sequences end to end; what is trained on weighs 1 over the denominator."""
    mask = np.concatenate([example.mask for example in mine])
    return MicroBatch(
        tokens=np.concatenate([example.tokens for example in mine]),
        labels=np.concatenate([example.labels for example in mine]),
        cu_seqlens=np.cumsum([0, *(len(example.tokens) for example in mine)]).astype(np.int32),
        loss_mask=mask,
        weights=(mask / denominator).astype(np.float32),
        rollout_logprobs=np.concatenate([example.rollout_logprobs for example in mine]),
        sample_index=np.arange(len(mine)),
    )
