"""Joins the ranks, and makes Megatron's process groups for each layout: roles of different layouts share a process.

megarl passes groups. Parts of Megatron still read them from the globals of `parallel_state`: `Groups.active` is the one
place that puts a layout's globals there, for as long as its role works. Import only after
`models.bootstrap.prepare_megatron`: Megatron has to meet the platform first. Which rank does what is decided in `layout`.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from megarl.core.layout import Layout, Place, place
from megarl.core.platform import Platform

ORDER = "tp-cp-ep-dp-pp"
# What destroy_model_parallel leaves alone, because it is not a layout's own.
SHARED = frozenset({"_GLOBAL_MEMORY_BUFFER", "_GLOBAL_SYMMETRIC_MEMORY_BUFFER"})


def _globals() -> dict[str, Any]:
    """Megarl's view of Megatron's parallel state: every global that a layout decides."""
    return {
        name: value
        for name, value in vars(mpu).items()
        if name.startswith("_") and name.isupper() and name not in SHARED
    }


@dataclass(frozen=True)
class Groups:
    """One layout's process groups, as this rank sees them. Make them with `make_groups`, on every rank."""

    rank: int
    layout: Layout
    collection: ProcessGroupCollection
    _state: dict[str, Any] = field(repr=False)

    @property
    def place(self) -> Place:
        """This rank's index on every axis."""
        return place(self.rank, self.layout)

    @property
    def tp(self) -> dist.ProcessGroup:
        """Tensor-parallel ranks."""
        return self._group("tp")

    @property
    def cp(self) -> dist.ProcessGroup:
        """Context-parallel ranks."""
        return self._group("cp")

    @property
    def pp(self) -> dist.ProcessGroup:
        """Pipeline ranks."""
        return self._group("pp")

    @property
    def dp_cp(self) -> dist.ProcessGroup:
        """Ranks that hold the same part of the dense weights."""
        return self._group("dp_cp")

    def _group(self, name: str) -> dist.ProcessGroup:
        group: dist.ProcessGroup = getattr(self.collection, name)
        return group

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits."""
        return self.place.pp == self.layout.pp - 1

    def close(self) -> None:
        """Leave these groups; nothing may use them afterwards. Every rank calls it.

        Groups cost threads and sockets, in gloo some for each pair of ranks, and stay until they are left.
        """
        found = {id(value): value for value in self._state.values() if isinstance(value, dist.ProcessGroup)}
        for group in found.values():
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    def sum_over_context(self, part: Tensor) -> Tensor:
        """The sum over the ranks that hold parts of the same sequences; its gradient is the sum of theirs."""
        if self.layout.cp == 1:
            return part
        total: Tensor = _Sum.apply(part, self.cp)  # type: ignore[no-untyped-call]
        return total

    @contextmanager
    def active(self) -> Iterator[None]:
        """Megatron's globals are this layout's within the block, and what they were before behind it; nests."""
        before = _globals()
        vars(mpu).update(self._state)
        try:
            yield
        finally:
            vars(mpu).update(before)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Every rank's loss depends on every rank's part.
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def join_ranks(rank: int, world_size: int, platform: Platform, address: str, port: int, *, timeout_s: float) -> None:
    """Join the process group at tcp://address:port; every rank calls it.

    timeout_s: longest wait for the other ranks, here and in every later collective.
    """
    timeout = timedelta(seconds=timeout_s)
    # torch's own listens on all interfaces and asks nobody who he is: where the ranks find each other anybody could write.
    listener = socket.create_server((address, port)).detach() if rank == 0 else None
    store = TCPStore(address, port, world_size, rank == 0, timeout, master_listen_fd=listener)
    dist.init_process_group(platform.backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def make_groups(layout: Layout, *, timeout_s: float, seed: int) -> Groups:
    """Make a layout's process groups over all ranks; collective, and Megatron's globals are left as they were."""
    before = _globals()
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        order=ORDER,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),  # whole minutes, and never less than was asked for
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    groups = Groups(dist.get_rank(), layout, ProcessGroupCollection.use_mpu_process_groups(), _globals())
    _check(groups)
    vars(mpu).update(before)
    return groups


def _check(groups: Groups) -> None:
    """Our arithmetic is Megatron's."""
    where, collection = groups.place, groups.collection
    found = {
        "tp": dist.get_rank(collection.tp),
        "cp": dist.get_rank(collection.cp),
        "dp": dist.get_rank(collection.dp),
        "pp": dist.get_rank(collection.pp),
        "etp": dist.get_rank(collection.expt_tp),
        "ep": dist.get_rank(collection.ep),
        "edp": dist.get_rank(collection.expt_dp),
    }
    assert found == vars(where), (found, where, groups.layout)


def close_ranks() -> None:
    """Leave all process groups; other ranks need not be alive."""
    if dist.is_initialized():
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
