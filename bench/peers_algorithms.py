"""megarl's advantages and losses beside verl's core_algos, on the same batch: numbers, and seconds on one thread.

    python -m bench.peers_algorithms

verl's pinned release goes into a folder of its own in .cache/, by pip and without the packages that its trainers need. Both sides
get the same samples: verl as tensors padded to the longest, megarl as sequences end to end. What differs on purpose is in
`DIFFERENCES`: what verl's numbers have to be multiplied by, or which cases the batch leaves out, and why; beyond these every
number has to be equal, gradients too. Writes bench/results/peers_algorithms.json. Exit code 0 only where all is equal.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from bench.support.measure import write
from bench.support.quickstart import ROOT
from bench.support.seconds import fastest
from megarl.algorithms.advantage import (
    gpg_advantages,
    group_advantages,
    opo_advantages,
    reinforce_pp_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)
from megarl.algorithms.kl import KlKind, kl_estimate
from megarl.algorithms.policy_loss import cispo_loss, clipped_policy_loss, gspo_loss
from megarl.algorithms.ragged import spread
from megarl.algorithms.reduce import Reduction, sample_weights
from megarl.algorithms.returns import gae, reinforce_pp_advantages, whiten
from megarl.algorithms.sequences import sequence_log_ratio
from megarl.algorithms.value_loss import clipped_value_loss

PINS = (
    *("verl==0.9.1", "tensordict==0.15.3", "omegaconf==2.4.0", "antlr4-python3-runtime==4.9.3"),
    *("hydra-core==1.3.8", "codetiming==1.4.0", "pyvers==0.2.3"),
)
GAMMA, LAM, CLIP_LOW, CLIP_HIGH, DUAL_CLIP, VALUE_CLIP = 0.99, 0.95, 0.2, 0.28, 3.0, 0.5
TOLERANCE = 2e-5  # of the largest number: both compute in float32, and add in other orders
REPEATS = 5


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

    def value(given: torch.Tensor) -> Any:
        return clipped_value_loss(given, tensors["values"], tensors["returns"], VALUE_CLIP)

    def cispo(given: torch.Tensor) -> Any:
        return cispo_loss(given, old, advantages, CLIP_LOW, CLIP_HIGH)

    return {
        "PPO": lambda: learn("logprobs", "token-mean", clipped),
        "PPO, a sequence's mean": lambda: learn("logprobs", "sequence-mean", clipped),
        "PPO, constant": lambda: learn("logprobs", "constant", clipped),
        "GSPO": lambda: learn("logprobs", "sequence-mean", gspo),
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


def few(batch: Batch) -> float:
    """From a group's sample standard deviation to its population's."""
    size = np.bincount(batch.groups)[0]
    return float(np.sqrt(size / (size - 1)))


def all_tokens(batch: Batch) -> float:
    """The same over all trained tokens."""
    size = batch.mask.sum()
    return float(np.sqrt(size / (size - 1)))


def teaching(batch: Batch) -> float:
    """Samples whose reward is not 0, over those in groups whose rewards differ."""
    differ = [np.ptp(batch.rewards[batch.groups == group]) > 0 for group in batch.groups]
    return float(np.count_nonzero(batch.rewards) / max(1, sum(differ)))


@dataclass(frozen=True)
class Difference:
    """What differs on purpose. factor: what verl's numbers are multiplied by to be ours; None where cases are left out."""

    of: tuple[str, ...]
    what: str
    why: str
    factor: Callable[[Batch], float] | None = None


DIFFERENCES = (
    Difference(
        ("GRPO", "GRPO, vectorized"),
        "the standard deviation of a group: verl divides by n - 1, megarl by n",
        "the rewards of a group are all that there is to compare with, and the paper (arXiv 2402.03300) says std; "
        "in a group of 8 the advantages differ by 7%, which the learning rate takes up",
        few,
    ),
    Difference(
        ("REINFORCE++", "REINFORCE++ baseline", "GAE"),
        "whitening: verl's variance divides by n - 1 and has 1e-8 under the root, megarl's by n, and 1e-8 beside the deviation",
        "the same of thousands of tokens; all-equal values become exactly 0",
        all_tokens,
    ),
    Difference(
        ("GPG",),
        "alpha: verl counts samples whose reward is not 0, megarl those in groups whose rewards differ",
        "the paper's (arXiv 2504.02546) is about samples that give no gradient; verl's hangs on where the scale has its zero",
        teaching,
    ),
    Difference(
        ("GRPO", "Dr.GRPO", "RLOO", "OPO", "REINFORCE++ baseline"),
        "a group of one: verl keeps the reward as the advantage (its vectorized RLOO: 0), megarl gives 0",
        "one sample has nothing to be compared with",
    ),
    Difference(
        ("GRPO", "GRPO, vectorized"),
        "a group of equal rewards: verl's mean in float32 may leave rounding, which eps of 1e-6 makes visible; megarl's is 0",
        "such a group teaches nothing",
    ),
    Difference(
        ("GSPO",),
        "the log of a sequence's ratio: verl bounds it from above by 10, megarl by 20 on both sides",
        "far outside of any clip range; all of megarl's ratios have one bound",
    ),
    Difference(
        ("KL k3", "KL k2", "KL abs"),
        "bounds: verl bounds k3 itself by 10 and leaves k2 and abs as they are, megarl bounds the difference by 20 in all three",
        "the gradient of an extreme token stays what the estimator says, and finite",
    ),
    Difference(
        ("PPO, constant",),
        "verl divides by the samples that have trained tokens and the longest of the batch unless told, megarl by all samples "
        "and the recipe's longest response",
        "a constant is one: it does not hang on the batch (arXiv 2503.20783)",
    ),
)


def factor(name: str, batch: Batch) -> float:
    """What verl's numbers have to be multiplied by."""
    found = [each.factor(batch) for each in DIFFERENCES if name in each.of and each.factor is not None]
    return found[0] if found else 1.0


def verl_folder() -> Path:
    """Where verl is, which is put there where it is not."""
    folder = ROOT / ".cache" / f"verl-{hashlib.sha256(' '.join(PINS).encode()).hexdigest()[:12]}"
    if not (folder / "made").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PINS]
        subprocess.run(command, check=True)
        (folder / "made").touch()
    return folder


def verl_side(batch: Batch, repeats: int) -> dict[str, np.ndarray]:
    """What verl's functions return, padded, with their seconds."""
    given = {name: batch.padded(column) for name, column in batch.columns.items()}
    given |= {"mask": batch.padded(batch.mask), "groups": batch.groups, "greedy": batch.greedy[batch.groups]}
    settings = {
        **{"gamma": GAMMA, "lam": LAM, "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH},
        **{"dual_clip": DUAL_CLIP, "value_clip": VALUE_CLIP},
    }
    given |= {name: np.array(value) for name, value in settings.items()}
    with tempfile.TemporaryDirectory() as folder:
        asked, found = Path(folder) / "batch.npz", Path(folder) / "found.npz"
        np.savez(asked, allow_pickle=False, **given)
        done = subprocess.run(
            [sys.executable, "-m", "bench.support.verl_algorithms", str(asked), str(found), str(repeats)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(verl_folder()), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"verl's side exited with {done.returncode}: {done.stderr[-3000:]}")
        return dict(np.load(found))


def compare(batch: Batch, theirs: dict[str, np.ndarray], repeats: int) -> list[dict[str, Any]]:
    """A row for each function: its largest difference, over the largest number, and seconds of both sides."""
    rows = []
    for name, call in {**our_advantages(batch), **our_losses(batch), **our_penalties(batch)}.items():
        result, seconds = fastest(call, repeats)
        errors = []
        for number, part in enumerate(result if isinstance(result, tuple) else (result,)):
            other = theirs[f"{name}/{number}"] * factor(name, batch)
            other = batch.ragged(other) if other.ndim else other
            errors.append(float(np.abs(part - other).max() / max(np.abs(part).max(), 1e-12)))
        verl_s = float(theirs[f"{name}/seconds"])
        rows.append(
            {"name": name, "factor": factor(name, batch), "error": max(errors), "megarl_s": seconds, "verl_s": verl_s}
        )
    return rows


def main(
    *,
    quick: Annotated[bool, typer.Option(help="A small batch: proves that both sides run.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the result; bench/results where not given.")] = None,
) -> None:
    """Compare megarl's algorithms with verl's."""
    torch.set_num_threads(1)
    batch, repeats = make_batch(QUICK if quick else Size()), 1 if quick else REPEATS
    rows = compare(batch, verl_side(batch, repeats), repeats)
    table = Table("", "largest difference", "verl's times", "megarl, ms", "verl, ms", title=PINS[0])
    for row in rows:
        times = [f"{row[side] * 1e3:.2f}" for side in ("megarl_s", "verl_s")]
        table.add_row(row["name"], f"{row['error']:.1e}", f"{row['factor']:.4f}", *times)
    Console().print(table)
    differences = [{"of": each.of, "what": each.what, "why": each.why} for each in DIFFERENCES]
    size = {"samples": len(batch.rewards), "tokens": len(batch.mask), "trained": int(batch.mask.sum())}
    write("peers_algorithms", {"verl": PINS[0], "batch": size, "rows": rows, "differences": differences}, out)
    wrong = [row["name"] for row in rows if row["error"] > TOLERANCE]
    if wrong:
        sys.exit(f"Not equal: {', '.join(wrong)}")


if __name__ == "__main__":
    typer.run(main)
