"""The choices that a placement is made of, as tables: every parallel layout of a role, every size of a server.

One row is one choice; columns are numpy arrays, so that time and memory of all of them are computed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from megarl.core.layout import Layout
from megarl.models.config import ModelConfig
from megarl.models.flops import Recompute
from megarl.models.layout_check import layout_problems

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Space:
    """The values that each choice may take. A model that a value does not divide leaves it out by itself.

    tp, pp, cp, ep: sizes of the axes of a Megatron role; tensor parallel stays within a node, and experts are not cut
    by it (etp 1). recompute: activations. rest: whether a role may leave the device while it is not its turn.
    memory_shares: share of the device's memory that a server may take while it is awake. server_nodes: whole nodes of one
    server, where none within a node holds the model.
    """

    tp: tuple[int, ...] = (1, 2, 4, 8)
    pp: tuple[int, ...] = (1, 2, 4, 8, 16)
    cp: tuple[int, ...] = (1, 2, 4, 8)
    ep: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    recompute: tuple[Recompute, ...] = ("none", "full")
    rest: tuple[bool, ...] = (False, True)
    memory_shares: tuple[float, ...] = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    server_nodes: tuple[int, ...] = (2, 4)


@dataclass(frozen=True)
class Layouts:
    """[N] choices of a Megatron role. recompute: index into RECOMPUTE. micro_tokens: of one data-parallel rank."""

    devices: Ints
    tp: Ints
    pp: Ints
    cp: Ints
    ep: Ints
    micro_tokens: Ints
    recompute: Ints

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def dp(self) -> Ints:
        """Data-parallel ranks."""
        return self.devices // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> Ints:
        """Copies of each expert."""
        return self.devices // (self.pp * self.ep)

    def take(self, rows: Ints | Mask) -> Layouts:
        """Some of the choices."""
        return replace(self, **{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def layout(self, row: int) -> Layout:
        """One choice as the rest of megarl says it."""
        tp = int(self.tp[row])
        return Layout(
            tp=tp,
            pp=int(self.pp[row]),
            cp=int(self.cp[row]),
            ep=int(self.ep[row]),
            sequence_parallel=tp > 1,
            world_size=int(self.devices[row]),
        )


@dataclass(frozen=True)
class Servers:
    """[N] choices of the rollout. devices: of the pool. tp: devices of one server. share: of a device's memory while awake.

    used: devices that servers are on.
    """

    devices: Ints
    tp: Ints
    share: NDArray[np.float64]
    used: Ints

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def count(self) -> Ints:
        """Servers."""
        return self.used // self.tp

    def take(self, rows: Ints | Mask) -> Servers:
        """Some of the choices."""
        return Servers(self.devices[rows], self.tp[rows], self.share[rows], self.used[rows])


def layouts(
    space: Space,
    config: ModelConfig,
    pool_sizes: Sequence[int],
    node: int,
    micro_tokens: Sequence[int],
    *,
    most_dp: int,
    trained: bool,
) -> Layouts:
    """Every layout that the model and the numbers of devices allow. most_dp: samples that there are to share out."""
    shapes = _shapes(space, config, node)
    recompute = [RECOMPUTE.index(kind) for kind in space.recompute] if trained else [0]
    table = np.array(list(product(pool_sizes, range(len(shapes)), micro_tokens, recompute)), np.int64).reshape(-1, 4)
    shape = shapes[table[:, 1]]
    size, expert_size = shape[:, 0] * shape[:, 1] * shape[:, 2], shape[:, 1] * shape[:, 3]
    devices = table[:, 0]
    fits = (devices % size == 0) & (devices % expert_size == 0) & (devices // size <= most_dp)
    shape, table = shape[fits], table[fits]
    return Layouts(
        devices=table[:, 0],
        tp=shape[:, 0],
        pp=shape[:, 1],
        cp=shape[:, 2],
        ep=shape[:, 3],
        micro_tokens=table[:, 2],
        recompute=table[:, 3],
    )


@lru_cache(maxsize=16)
def _shapes(space: Space, config: ModelConfig, node: int) -> Ints:
    """[N, 4] sizes of tp, pp, cp, ep that the model can be cut by; roles often share a model. Not to be written to."""
    found = []
    experts = space.ep if config.moe is not None else (1,)
    for tp, pp, cp, ep in product(space.tp, space.pp, space.cp, experts):
        if tp > node or node % tp:
            continue
        layout = Layout(tp=tp, pp=pp, cp=cp, ep=ep, sequence_parallel=tp > 1, world_size=tp * pp * cp * ep)
        if not layout_problems(config, layout):
            found.append((tp, pp, cp, ep))
    return np.array(found, np.int64).reshape(-1, 4)


def servers(
    space: Space,
    config: ModelConfig,
    pool_sizes: Sequence[int],
    node: int,
    *,
    spanning: bool = False,
    fewer: bool = False,
) -> Servers:
    """Every number and size of servers that the model and the numbers of devices allow.

    spanning: each over several nodes. fewer: also on half of a pool's devices, a quarter and so on, which is worth it only
    where devices share cores.
    """
    allowed = [node * nodes for nodes in space.server_nodes] if spanning else [s for s in space.tp if node % s == 0]
    sizes = [size for size in allowed if _cuts_servers(config, size)]
    rows = [
        (devices, tp, share, used)
        for devices, tp, share in product(pool_sizes, sizes, space.memory_shares)
        for used in ([devices >> power for power in range(devices.bit_length())] if fewer else [devices])
        if used % tp == 0
    ]
    table = np.array(rows, np.float64).reshape(-1, 4)
    whole = table.astype(np.int64)
    return Servers(whole[:, 0], whole[:, 1], table[:, 2], whole[:, 3])


def _cuts_servers(config: ModelConfig, tp: int) -> bool:
    """SGLang cuts heads and MLP columns evenly, and repeats key-value heads where there are fewer than ranks."""
    heads = config.num_kv_heads
    even = config.num_heads % tp == 0 and config.ffn_hidden_size % tp == 0
    return even and (config.mla is not None or heads % tp == 0 or tp % heads == 0)
