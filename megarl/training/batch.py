"""A MicroBatch as tensors on a rank's device, with its columns. Processes exchange numpy; devices hold tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.core.types import FloatArray, MicroBatch


@dataclass(frozen=True)
class DeviceBatch:
    """One packed forward pass: T tokens, S sequences; see MicroBatch for the fields that it shares."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64, counted from the start of each sequence
    labels: Tensor  # [T] int64
    cu_seqlens: Tensor  # [S + 1] int32
    mask: Tensor  # [T] float32, 1 where the label is trained on
    weights: Tensor  # [T] float32
    rollout_logprobs: Tensor  # [T] float32
    columns: dict[str, Tensor]  # name -> [T] float32, label-aligned

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.tokens.shape[0]


def to_device(micro: MicroBatch, columns: dict[str, FloatArray], device: str) -> DeviceBatch:
    """Copy a micro-batch and its columns (each [T]) to a device."""

    def move(array: NDArray[np.generic], dtype: torch.dtype) -> Tensor:
        # A copy: arrays from an object store are read-only, which a tensor cannot express.
        return torch.tensor(array, dtype=dtype, device=device)

    lengths = np.diff(micro.cu_seqlens)
    positions = np.arange(micro.num_tokens) - np.repeat(micro.cu_seqlens[:-1], lengths)
    return DeviceBatch(
        tokens=move(micro.tokens, torch.int64),
        positions=move(positions, torch.int64),
        labels=move(micro.labels, torch.int64),
        cu_seqlens=move(micro.cu_seqlens, torch.int32),
        mask=move(micro.loss_mask, torch.float32),
        weights=move(micro.weights, torch.float32),
        rollout_logprobs=move(micro.rollout_logprobs, torch.float32),
        columns={name: move(column, torch.float32) for name, column in columns.items()},
    )
