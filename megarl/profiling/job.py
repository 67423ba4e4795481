"""What the ranks of a profile are told and what they answer. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megarl.core.layout import Layout
from megarl.core.platform import PlatformName
from megarl.serving.client import ServerEndpoint

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Case:
    """A log-prob pass over, and an update on, equal sequences by a reference model.

    model: index into Job.models. sequences, tokens: how many, and how long each is. micro_tokens: of one micro-batch.
    """

    model: int
    layout: Layout
    sequences: int
    tokens: int
    micro_tokens: int


@dataclass(frozen=True)
class Job:
    """What `world_size` ranks of this machine measure together. port: where they meet. repeats: of each timing.

    servers: that the weights of every model are sent to, by one rank.
    """

    platform: PlatformName
    dtype: Dtype
    models: tuple[Path, ...]
    cases: tuple[Case, ...]
    world_size: int
    port: int
    deadline_s: float
    repeats: int = 5
    servers: tuple[ServerEndpoint, ...] = ()


@dataclass(frozen=True)
class Timed:
    """Median seconds of a case's two operations, until the slowest rank had finished."""

    case: Case
    score_s: float
    update_s: float


@dataclass(frozen=True)
class Raw:
    """What the devices do outside of any model, all ranks at once; of one rank.

    flops: of large matrix products in the job's dtype. memory_bytes_s: read and written by copies. host_bytes_s: from the
    device to the host. all_reduce_s, all_gather_s: seconds by bytes in all; empty where there is one rank.
    """

    flops: float
    memory_bytes_s: float
    host_bytes_s: float
    all_reduce_s: Mapping[int, float]
    all_gather_s: Mapping[int, float]


@dataclass(frozen=True)
class Measured:
    """What one number of ranks measured. sync_s: seconds of sending the first model's weights to servers; None without."""

    world_size: int
    raw: Raw
    timed: tuple[Timed, ...]
    sync_s: float | None = None
