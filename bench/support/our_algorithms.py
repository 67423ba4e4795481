"""A batch for bench/peers_algorithms, and megarl's side of it: what its advantages, losses, penalties and corrections give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from megarl.algorithms.advantage import (
    gpg_advantages,
    group_advantages,
    opo_advantages,
    reinforce_pp_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)
from megarl.algorithms.correction import (
    Correction,
    Level,
    both,
    importance_ratios,
    mask_outside,
    reject,
    truncate,
)
from megarl.algorithms.kl import KlKind, kl_estimate
from megarl.algorithms.policy_loss import cispo_loss, clipped_policy_loss, gmpo_loss, gspo_loss
from megarl.algorithms.ragged import spread
from megarl.algorithms.reduce import Reduction, sample_weights
from megarl.algorithms.returns import gae, reinforce_pp_advantages, whiten
from megarl.algorithms.sequences import sequence_log_ratio
from megarl.algorithms.value_loss import clipped_value_loss

MIN_RATIO, MAX_RATIO, MEAN_RATIO = 0.8, 1.5, 1.03  # bounds of importance weights; the last of a sequence's mean
GAMMA, LAM, CLIP_LOW, CLIP_HIGH, DUAL_CLIP, VALUE_CLIP = 0.99, 0.95, 0.2, 0.28, 3.0, 0.5


@dataclass(frozen=True)
class Size:
    """A batch. groups of `samples` each; lengths are log-normal."""

    groups: int = 64
    samples: int = 8
    median: int = 128
    longest: int = 1024


QUICK = Size(groups=6, samples=4, median=12, longest=40)


@dataclass(frozen=True)
class Batch:
    """N samples of T response tokens. of [T]: mask (a turn of the environment in every fourth sample), and columns."""

    mask: np.ndarray
    cu_seqlens: np.ndarray
    groups: np.ndarray  # [N]
    rewards: np.ndarray  # [N]
    greedy: np.ndarray  # [groups], of each prompt's greedy answer
    columns: dict[str, np.ndarray]

    @property
    def lengths(self) -> np.ndarray:
        """[N] trained tokens."""
        return np.add.reduceat(self.mask, self.cu_seqlens[:-1])

    def padded(self, column: np.ndarray) -> np.ndarray:
        """[N, longest], zeros behind the end."""
        sizes = np.diff(self.cu_seqlens)
        table = np.zeros((len(sizes), sizes.max()), np.float32)
        for row, (start, size) in enumerate(zip(self.cu_seqlens, sizes, strict=False)):
            table[row, :size] = column[start : start + size]
        return table

    def ragged(self, table: np.ndarray) -> np.ndarray:
        """[T] of [N, longest]; 0 outside of the mask."""
        sizes = np.diff(self.cu_seqlens)
        rows = [row[:size] for row, size in zip(table, sizes, strict=True)]
        column: np.ndarray = np.concatenate(rows) * self.mask
        return column


def make_batch(size: Size, seed: int = 0) -> Batch:
    """Groups of rewards from 0 to 1 in steps, some all equal."""
    random = np.random.default_rng(seed)
    count = size.groups * size.samples
    lengths = random.lognormal(np.log(size.median), 0.8, count).clip(4, size.longest).astype(int)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    mask = np.ones(bounds[-1], np.float32)
    for index in range(0, count, 4):
        start, third = bounds[index], lengths[index] // 3
        mask[start + third : start + 2 * third] = 0
    groups = np.repeat(np.arange(size.groups), size.samples)
    rewards = (random.integers(0, 5, count) / 4).astype(np.float32)
    rewards[groups % 5 == 0] = 0.75
    tokens = len(mask)
    old = (-1 - random.exponential(1.0, tokens)).astype(np.float32)
    columns = {
        "old_logprobs": old,
        "logprobs": (old + 0.3 * random.standard_normal(tokens)).astype(np.float32),
        "advantages": random.standard_normal(tokens).astype(np.float32),
        "values": random.standard_normal(tokens).astype(np.float32),
        "returns": random.standard_normal(tokens).astype(np.float32),
    }
    columns["new_values"] = (columns["values"] + 0.6 * random.standard_normal(tokens)).astype(np.float32)
    rewards_at = np.zeros(tokens, np.float32)
    rewards_at[bounds[1:] - 1] = rewards
    columns["token_rewards"] = rewards_at
    columns["sequence_advantages"] = np.repeat(random.standard_normal(count), lengths).astype(np.float32)
    return Batch(mask, bounds, groups, rewards, random.random(size.groups).astype(np.float32), columns)


def our_advantages(batch: Batch) -> dict[str, Callable[[], np.ndarray]]:
    """By verl's name: [T]."""
    rewards, groups, mask, bounds = batch.rewards, batch.groups, batch.mask, batch.cu_seqlens

    def at_tokens(values: np.ndarray) -> np.ndarray:
        return spread(values, mask, bounds)

    at_rewards = batch.columns["token_rewards"]
    values, settings = batch.columns["values"], {"gamma": GAMMA, "lam": LAM}
    return {
        "GRPO": lambda: at_tokens(group_advantages(rewards, groups, True)),
        "GRPO, vectorized": lambda: at_tokens(group_advantages(rewards, groups, True)),
        "Dr.GRPO": lambda: at_tokens(group_advantages(rewards, groups, False)),
        "RLOO": lambda: at_tokens(rloo_advantages(rewards, groups)),
        "RLOO, vectorized": lambda: at_tokens(rloo_advantages(rewards, groups)),
        "OPO": lambda: at_tokens(opo_advantages(rewards, groups, batch.lengths)),
        "ReMax": lambda: at_tokens(remax_advantages(rewards, groups, batch.greedy)),
        "GPG": lambda: at_tokens(gpg_advantages(rewards, groups)),
        "REINFORCE++": lambda: reinforce_pp_advantages(at_rewards, mask, bounds, gamma=GAMMA),
        "REINFORCE++ baseline": lambda: at_tokens(reinforce_pp_baseline_advantages(rewards, groups, batch.lengths)),
        "GAE": lambda: whiten(gae(at_rewards, values, mask, bounds, **settings).advantages, mask),
        "GAE, returns": lambda: gae(at_rewards, values, mask, bounds, **settings).returns,
    }


def our_losses(batch: Batch) -> dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]]:
    """By verl's name: the loss, and its gradient [T]."""
    tensors = {name: torch.from_numpy(column) for name, column in batch.columns.items()}
    mask, bounds = torch.from_numpy(batch.mask), torch.from_numpy(batch.cu_seqlens)
    old, advantages = tensors["old_logprobs"], tensors["advantages"]
    longest = int(np.diff(batch.cu_seqlens).max())

    def weights(mode: Reduction) -> torch.Tensor:
        return torch.from_numpy(spread(sample_weights(batch.lengths, mode, longest), batch.mask, batch.cu_seqlens))

    def learn(name: str, mode: Reduction, compute: Callable[[torch.Tensor], Any]) -> tuple[np.ndarray, np.ndarray]:
        given = tensors[name].clone().requires_grad_()
        loss = (compute(given).loss * weights(mode)).sum()
        loss.backward()
        assert given.grad is not None
        return loss.detach().numpy(), given.grad.numpy()

    def clipped(given: torch.Tensor) -> Any:
        return clipped_policy_loss(given, old, advantages, CLIP_LOW, CLIP_HIGH, DUAL_CLIP)

    def gspo(given: torch.Tensor) -> Any:
        ratio = sequence_log_ratio(given, old, mask, bounds)
        return gspo_loss(given, advantages, ratio, CLIP_LOW, CLIP_HIGH)

    def gmpo(given: torch.Tensor) -> Any:
        def mean(values: torch.Tensor) -> torch.Tensor:
            return sequence_log_ratio(values, torch.zeros_like(values), mask, bounds)

        return gmpo_loss(given, old, tensors["sequence_advantages"], mean, CLIP_LOW, CLIP_HIGH)

    def value(given: torch.Tensor) -> Any:
        return clipped_value_loss(given, tensors["values"], tensors["returns"], VALUE_CLIP)

    def cispo(given: torch.Tensor) -> Any:
        return cispo_loss(given, old, advantages, CLIP_LOW, CLIP_HIGH)

    return {
        "PPO": lambda: learn("logprobs", "token-mean", clipped),
        "PPO, a sequence's mean": lambda: learn("logprobs", "sequence-mean", clipped),
        "PPO, constant": lambda: learn("logprobs", "constant", clipped),
        "GSPO": lambda: learn("logprobs", "sequence-mean", gspo),
        "GMPO": lambda: learn("logprobs", "sequence-mean", gmpo),
        "CISPO": lambda: learn("logprobs", "token-mean", cispo),
        "value": lambda: learn("new_values", "token-mean", value),
    }


def our_penalties(batch: Batch) -> dict[str, Callable[[], np.ndarray]]:
    """By verl's name: [T]."""
    new, old = (torch.from_numpy(batch.columns[name]) for name in ("logprobs", "old_logprobs"))
    kinds: tuple[KlKind, ...] = ("k1", "k2", "k3", "abs")

    def penalty(kind: KlKind) -> np.ndarray:
        found: np.ndarray = kl_estimate(new, old, kind).numpy() * batch.mask
        return found

    return {f"KL {kind}": partial(penalty, kind) for kind in kinds}


def our_corrections(batch: Batch) -> dict[str, Callable[[], np.ndarray]]:
    """By verl's name: weights [T]. What the trainer says are logprobs, and what the rollout said old_logprobs."""
    mask, bounds = batch.mask, batch.cu_seqlens

    def ratios(level: Level) -> np.ndarray:
        return importance_ratios(batch.columns["logprobs"], batch.columns["old_logprobs"], mask, bounds, level)

    def truncated() -> Correction:
        return truncate(ratios("token"), mask, MAX_RATIO)

    def rejected() -> Correction:
        return both(truncated(), reject(ratios("geometric"), mask, bounds, 1 / MEAN_RATIO, MEAN_RATIO))

    return {
        "TIS": lambda: truncated().weights,
        "IcePop": lambda: mask_outside(ratios("token"), mask, MIN_RATIO, MAX_RATIO).weights,
        "TIS and rejection": lambda: rejected().weights,
    }


def our_side(batch: Batch) -> dict[str, Callable[[], Any]]:
    """By verl's name: all that is compared."""
    return {**our_advantages(batch), **our_losses(batch), **our_penalties(batch), **our_corrections(batch)}
