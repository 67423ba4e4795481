"""The training step that benchmarks time: a small random model, samples of log-normal lengths, one engine on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megarl.core.platform import get_platform
from megarl.core.types import Column, Shard
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.roles import Optimizer
from megarl.training.rank import Rank
from megarl.training.spec import Objective, PolicyObjective, RoleSpec
from tests.support.tiny import write_tiny_model
from tests.training.samples import Example, examples, shards

# eps far above rounding: Adam would turn the rounding of tiny gradients into whole steps, and outputs are compared.
OPTIMIZER = Optimizer(lr=1e-4, eps=1e-6)
ALGORITHM = Algorithm()


@dataclass(frozen=True)
class Size:
    """What is trained: a model `hidden` wide, and sequences around `median` tokens, at most `longest`."""

    layers: int = 4
    hidden: int = 256
    vocab: int = 8192
    sequences: int = 64
    median: int = 64
    longest: int = 1024
    micro_batches: int = 8


QUICK = Size(layers=1, hidden=32, vocab=128, sequences=8, median=12, longest=64, micro_batches=2)


def write_model(folder: Path, size: Size) -> Path:
    """A random Qwen3 with two key-value heads for every four heads."""
    return write_tiny_model(
        folder,
        "qwen3",
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=size.hidden // 4,
        vocab_size=size.vocab,
        max_position_embeddings=size.longest,
    )


def lengths(size: Size, sigma: float = 1.0, seed: int = 0) -> list[int]:
    """Log-normal lengths, cut off at the longest."""
    drawn = np.random.default_rng(seed).lognormal(np.log(size.median), sigma, size.sequences)
    return [int(length) for length in drawn.clip(4, size.longest)]


def micro_batches(size: Size, sigma: float = 1.0) -> list[list[Example]]:
    """The samples of one mini-batch, as many in each micro-batch."""
    made = examples(lengths(size, sigma), size.vocab)
    return [made[first :: size.micro_batches] for first in range(size.micro_batches)]


def to_shard(micros: list[list[Example]]) -> tuple[Shard, dict[str, Column]]:
    """The micro-batches as one shard, and its columns."""
    assigned = [example for row in zip(*micros, strict=True) for example in row]
    [shard], [columns] = shards([assigned], micro_batches=len(micros))
    return shard, columns


@contextmanager
def one_rank() -> Iterator[Rank]:
    """A rank that is the whole pool."""
    rank = Rank(0, 1, get_platform().name, seed=1)
    rank.rendezvous("127.0.0.1", rank.free_port(), timeout_s=60)
    try:
        yield rank
    finally:
        rank.close()


def role(folder: Path, objective: Objective | None = None) -> RoleSpec:
    """A policy in float32, under the plain clipped loss where nothing else is asked for."""
    learned = objective or PolicyObjective(ALGORITHM)
    return RoleSpec(folder, "float32", optimizer=OPTIMIZER, total_steps=1000, objective=learned)
