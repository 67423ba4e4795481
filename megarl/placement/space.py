"""The choices that a placement is made of, as tables: every parallel layout of a role, every size of a server.

One row is one choice; columns are numpy arrays, so that time and memory of all of them are computed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.core.layout import Layout
from megarl.models.config import ModelConfig
from megarl.models.flops import Recompute
from megarl.models.layout_check import cuts_servers, layout_problems
from megarl.placement.cuts import cuts

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
FULL = RECOMPUTE.index("full")
ALL_LAYERS = 1 << 20


@dataclass(frozen=True)
class Space:
    """The values that each choice may take. A model that a value does not divide leaves it out by itself.

    tp, pp, cp, ep: sizes of the axes of a Megatron role; tensor parallel stays within a node, and experts are not cut
    by it (etp 1). vpp: virtual stages of a pipeline rank. recompute: activations. rest: whether a role may leave the
    device while it is not its turn.
    memory_shares: of a server (placement/server_share.py); of 32 ranks, and of devices with less than 76 GiB, 0.9 leaves no room
    for the rest. server_nodes: whole nodes of one server, where none of tp's sizes holds the model; larger parts of a node are
    looked at with them.
    """

    tp: tuple[int, ...] = (1, 2, 4, 8)
    pp: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 12, 16)
    vpp: tuple[int, ...] = (1, 2)
    cp: tuple[int, ...] = (1, 2, 4, 8)
    ep: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    recompute: tuple[Recompute, ...] = ("none", "full")
    rest: tuple[bool, ...] = (False, True)
    memory_shares: tuple[float, ...] = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
    server_nodes: tuple[int, ...] = (2, 4)


@dataclass(frozen=True)
class Layouts:
    """[N] choices of a Megatron role. recompute: index into RECOMPUTE. micro_tokens: of one data-parallel rank.

    recomputed: with full, how many layers of each virtual stage; ALL_LAYERS or more where it is all.
    vpp: virtual stages of each pipeline rank. first_layers, last_layers: of the first and the last pipeline rank; 0 where
    they have as many as all others. etp: ranks that share the columns of each expert. sequence_parallel: 1 where tp also cuts
    what is between its regions, else 0.
    """

    devices: Ints
    tp: Ints
    pp: Ints
    cp: Ints
    ep: Ints
    micro_tokens: Ints
    recompute: Ints
    vpp: Ints
    first_layers: Ints
    last_layers: Ints
    recomputed: Ints
    etp: Ints
    sequence_parallel: Ints

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def dp(self) -> Ints:
        """Data-parallel ranks."""
        return self.devices // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> Ints:
        """Copies of each expert."""
        return self.devices // (self.pp * self.ep * self.etp)

    @property
    def padding(self) -> Any:
        """[N] tokens that each packed sequence is padded with, on average (`Layout.sequence_multiple`)."""
        multiple = np.where(self.cp > 1, 2 * self.cp, 1) * np.where(self.sequence_parallel > 0, self.tp, 1)
        return (multiple - 1) / 2

    def again(self, layers: Any) -> Any:
        """[N] which share of a pipeline rank's layers is recomputed whole. layers: [N] or a number, of the rank."""
        return (self.recompute == FULL) * np.minimum(1.0, self.recomputed * self.vpp / layers)

    def take(self, rows: Ints | Mask) -> Layouts:
        """Some of the choices."""
        return replace(self, **{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def layout(self, row: int) -> Layout:
        """One choice as the rest of megarl says it."""
        return Layout(
            tp=int(self.tp[row]),
            pp=int(self.pp[row]),
            cp=int(self.cp[row]),
            ep=int(self.ep[row]),
            etp=int(self.etp[row]),
            vpp=int(self.vpp[row]),
            sequence_parallel=bool(self.sequence_parallel[row]),
            first_stage_layers=int(self.first_layers[row]) or None,
            last_stage_layers=int(self.last_layers[row]) or None,
            world_size=int(self.devices[row]),
        )


def one_layout(
    layout: Layout, micro_tokens: int, recompute: Recompute = "none", recompute_num_layers: int | None = None
) -> Layouts:
    """One layout as the only choice. recompute_num_layers: as a recipe has it."""
    sizes = (layout.world_size, layout.tp, layout.pp, layout.cp, layout.ep, micro_tokens, RECOMPUTE.index(recompute))
    cut = (
        layout.vpp,
        layout.first_stage_layers or 0,
        layout.last_stage_layers or 0,
        recompute_num_layers or ALL_LAYERS,
        layout.etp,
        int(layout.sequence_parallel),
    )
    return Layouts(*(np.array([size], np.int64) for size in (*sizes, *cut)))


@dataclass(frozen=True)
class Servers:
    """[N] choices of the rollout. devices: of the pool. tp: devices of one server. used: devices that servers are on.

    share: of what a server finds free on a device, for its weights and its cache (placement/server_share.py).
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
    head: bool,
) -> Layouts:
    """Every layout that the model and the numbers of devices allow, cut as `cuts` proposes.

    most_dp: samples that there are to share out. head: whether the model ends in a vocabulary matrix.
    """
    shapes = _shapes(space, config, node, head)
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
        vpp=shape[:, 4],
        first_layers=shape[:, 5],
        last_layers=shape[:, 6],
        recomputed=np.full(len(table), ALL_LAYERS),
        etp=np.ones(len(table), np.int64),
        sequence_parallel=(shape[:, 0] > 1).astype(np.int64),
    )


@lru_cache(maxsize=16)
def _shapes(space: Space, config: ModelConfig, node: int, head: bool) -> Ints:
    """[N, 7] tp, pp, cp, ep, vpp, layers of the first and of the last rank; roles often share a model. Not to be written to."""
    found = []
    pipelines = [
        (pp, vpp, first, last)
        for pp, vpp in product(space.pp, space.vpp)
        for first, last in cuts(config, pp, vpp, head=head)
    ]
    experts = space.ep if config.moe is not None else (1,)
    for tp, cp, ep in product(space.tp, space.cp, experts):
        if tp > node or node % tp:
            continue
        # Pipelines are cut as they can be: it is the other axes that a model may not allow.
        layout = Layout(tp=tp, cp=cp, ep=ep, sequence_parallel=tp > 1, world_size=tp * cp * ep)
        if not layout_problems(config, layout):
            found += [(tp, pp, cp, ep, vpp, first, last) for pp, vpp, first, last in pipelines]
    return np.array(found, np.int64).reshape(-1, 7)


def servers(
    space: Space,
    config: ModelConfig,
    pool_sizes: Sequence[int],
    node: int,
    *,
    spanning: bool = False,
    fewer: bool = False,
    pads: bool = False,
) -> Servers:
    """Every number and size of servers that the model and the numbers of devices allow.

    spanning: each larger than tp's sizes, up to several nodes. fewer: also on half of a pool's devices, a quarter and so on,
    which is worth it only where devices share cores. pads: see `cuts_servers`.
    """
    allowed = [size for size in space.tp if node % size == 0]
    if spanning:
        powers = (2**power for power in range(node.bit_length()))
        allowed = [size for size in powers if size > max(space.tp) and node % size == 0]
        allowed += [node * nodes for nodes in space.server_nodes]
    sizes = [size for size in allowed if cuts_servers(config, size, pads=pads)]
    rows = [
        (devices, tp, share, used)
        for devices, tp, share in product(pool_sizes, sizes, space.memory_shares)
        for used in ([devices >> power for power in range(devices.bit_length())] if fewer else [devices])
        if used % tp == 0
    ]
    table = np.array(rows, np.float64).reshape(-1, 4)
    whole = table.astype(np.int64)
    return Servers(whole[:, 0], whole[:, 1], table[:, 2], whole[:, 3])
