"""What the advantages of a step cost on one core, beside the straightforward loops. One command:

    python -m bench.algorithms

A million tokens in ragged sequences, of which each begins with a prompt that is not trained on; 8,192 samples in groups of
16. Seconds are this process's own CPU time, median over calls, so that a busy machine does not count; wall time is shown
beside it. Results of both sides are checked to agree. Exit code 0 only where both targets hold.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.support.measure import no_options, write
from megarl.algorithms.advantage import group_advantages
from megarl.algorithms.correction import importance_ratios, truncate
from megarl.algorithms.returns import gae, whiten

NUM_TOKENS = 1_000_000
NUM_GROUPS, GROUP_SIZE = 512, 16
TARGETS_MS = {"GAE": 10.0, "GAE, prompts masked": 10.0, "group advantages": 1.0}
GAMMA, LAM = 1.0, 0.95


@dataclass(frozen=True)
class Cost:
    """Milliseconds of one call: CPU time, wall time, and the same by a loop in Python where there is one."""

    cpu_ms: float
    wall_ms: float
    loop_ms: float | None = None


@dataclass(frozen=True)
class Tokens:
    rewards: np.ndarray
    values: np.ndarray
    mask: np.ndarray
    cu_seqlens: np.ndarray


def make_tokens(num_tokens: int, masked: bool, seed: int = 0) -> Tokens:
    """Sequences of 1 to 4,096 tokens; where masked, a fifth of each is the prompt, and the last position predicts nothing."""
    random = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        lengths.append(min(int(random.integers(1, 4097)), num_tokens - sum(lengths)))
    bounds = np.cumsum([0, *lengths]).astype(np.int32)
    mask = np.ones(num_tokens, np.float32)
    if masked:
        for start, stop in itertools.pairwise(bounds):
            mask[start : start + (stop - start) // 5] = mask[stop - 1] = 0
    rewards, values = (random.normal(size=num_tokens).astype(np.float32) * mask for _ in range(2))
    return Tokens(rewards, values, mask, bounds)


def gae_by_loop(tokens: Tokens) -> np.ndarray:
    """From the end of each sequence to its start, one token at a time."""
    advantages = np.zeros(len(tokens.mask), np.float32)
    for start, stop in itertools.pairwise(tokens.cu_seqlens):
        advantage = next_value = 0.0
        for t in range(stop - 1, start - 1, -1):
            if tokens.mask[t]:
                delta = tokens.rewards[t] + GAMMA * next_value - tokens.values[t]
                advantage = delta + GAMMA * LAM * advantage
                advantages[t], next_value = advantage, tokens.values[t]
    return advantages


def groups_by_loop(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """One group at a time."""
    advantages = np.zeros(len(rewards), np.float32)
    for group in range(int(groups.max()) + 1):
        mine = groups == group
        advantages[mine] = (rewards[mine] - rewards[mine].mean()) / (rewards[mine].std() + 1e-6)
    return advantages


def clock(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median CPU and wall milliseconds of one call, after one that is not counted."""
    call()
    cpu, wall = [], []
    for _ in range(repeats):
        cpu_began, wall_began = time.process_time(), time.perf_counter()
        call()
        cpu.append(time.process_time() - cpu_began)
        wall.append(time.perf_counter() - wall_began)
    return statistics.median(cpu) * 1e3, statistics.median(wall) * 1e3


def measure(num_tokens: int = NUM_TOKENS, num_groups: int = NUM_GROUPS, repeats: int = 30) -> dict[str, Cost]:
    costs: dict[str, Cost] = {}
    for name, masked in (("GAE", False), ("GAE, prompts masked", True)):
        tokens = make_tokens(num_tokens, masked)
        columns = (tokens.rewards, tokens.values, tokens.mask, tokens.cu_seqlens)
        loop_ms = clock(partial(gae_by_loop, tokens), 1)[0]
        ours = partial(gae, *columns, gamma=GAMMA, lam=LAM)
        np.testing.assert_allclose(ours().advantages, gae_by_loop(tokens), rtol=1e-3, atol=1e-3)
        costs[name] = Cost(*clock(ours, repeats), loop_ms)
    costs["whitening"] = Cost(*clock(lambda: whiten(tokens.values, tokens.mask), repeats))

    def correct() -> None:
        ratios = importance_ratios(tokens.values, tokens.rewards, tokens.mask, tokens.cu_seqlens, "token")
        truncate(ratios, tokens.mask, 2.0)

    costs["truncated importance weights"] = Cost(*clock(correct, repeats))
    rewards = np.random.default_rng(0).integers(0, 2, num_groups * GROUP_SIZE).astype(np.float32)
    groups = np.repeat(np.arange(num_groups), GROUP_SIZE)
    np.testing.assert_allclose(group_advantages(rewards, groups, True), groups_by_loop(rewards, groups), atol=1e-4)
    loop_ms = clock(lambda: groups_by_loop(rewards, groups), 3)[0]
    costs["group advantages"] = Cost(*clock(lambda: group_advantages(rewards, groups, True), repeats), loop_ms)
    return costs


def show(costs: dict[str, Cost]) -> bool:
    """Print the table; whether all targets hold."""
    table = Table("", "CPU ms", "wall ms", "loop, CPU ms", "target, ms", title="Advantages on one core")
    for name, cost in costs.items():
        loop = "" if cost.loop_ms is None else f"{cost.loop_ms:,.1f}"
        target = f"{TARGETS_MS[name]:g}" if name in TARGETS_MS else ""
        table.add_row(name, f"{cost.cpu_ms:.2f}", f"{cost.wall_ms:.2f}", loop, target)
    Console().print(table)
    return all(costs[name].cpu_ms <= target for name, target in TARGETS_MS.items())


def main() -> None:
    costs = measure()
    what = {"num_tokens": NUM_TOKENS, "num_samples": NUM_GROUPS * GROUP_SIZE}
    write("algorithms", {**what, "costs": {name: asdict(cost) for name, cost in costs.items()}}, None)
    sys.exit(0 if show(costs) else 1)


if __name__ == "__main__":
    no_options(__doc__)
    main()
