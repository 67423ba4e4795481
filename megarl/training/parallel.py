"""Joins the ranks: torch.distributed, Megatron's model-parallel groups, and the seeds.

Import only after `models.bootstrap.prepare_megatron`: Megatron has to meet the platform first. Which rank does what is
decided in `layout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megarl.core.platform import Platform
from megarl.training.layout import Layout, dp_rank, tp_rank


@dataclass(frozen=True)
class Groups:
    """This rank's place and the process groups that it takes part in."""

    rank: int
    layout: Layout
    tp: dist.ProcessGroup
    dp: dist.ProcessGroup

    @property
    def tp_rank(self) -> int:
        """Index in the tensor-parallel group."""
        return tp_rank(self.rank, self.layout)

    @property
    def dp_rank(self) -> int:
        """Index of the shard that this rank works on."""
        return dp_rank(self.rank, self.layout)


def init_parallel(
    rank: int, layout: Layout, platform: Platform, address: str, port: int, *, timeout_s: float, seed: int
) -> Groups:
    """Join the process group at tcp://address:port and make Megatron's groups; every rank calls it.

    timeout_s: longest wait for the other ranks, here and in every later collective.
    """
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        platform.backend,
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=layout.world_size,
        timeout=timeout,
    )
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        order="tp-cp-ep-dp-pp",
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    groups = Groups(rank, layout, mpu.get_tensor_model_parallel_group(), mpu.get_data_parallel_group())
    assert dist.get_rank(groups.tp) == groups.tp_rank, (rank, layout)
    assert dist.get_rank(groups.dp) == groups.dp_rank, (rank, layout)
    return groups


def close_parallel() -> None:
    """Leave the process groups; other ranks need not be alive."""
    if dist.is_initialized():
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
