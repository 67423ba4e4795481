"""One process on one device, which hosts every Megatron role of its pool. A plain class: Ray is megarl/cluster's.

This module imports neither torch nor Megatron when it loads: the driver imports it too (cluster/ranks.py), and on a rank
Megatron has to meet the platform first.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megarl.core.errors import MegarlError
from megarl.core.layout import Layout, is_lead
from megarl.core.loading import as_if_missing, without_collection
from megarl.core.metrics import Operation
from megarl.core.platform import Platform, PlatformName, get_platform, peak_bytes, reset_peak_bytes, return_free_memory
from megarl.core.ports import kept_port
from megarl.core.progress import Progress
from megarl.core.types import Column, FloatArray, MiniBatch, MiniBatches, Shard
from megarl.models.hf_config import load_model_config
from megarl.models.tower_files import with_tower
from megarl.recipe.section import Part
from megarl.training.manifest import read_saved_config
from megarl.training.spec import RoleSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megarl.models.hf_weights import Bucket
    from megarl.training.checkpoint import PendingSave
    from megarl.training.engine import Engine
    from megarl.training.losses import Loss
    from megarl.training.parallel import Groups

EXPORT_BUCKET_BYTES = 512 * 2**20
# What a role holds on a device (training/offload.py).
PARTS: tuple[Part, ...] = ("grads", "params", "optimizer")
# Where a rank learns, these come before its update.
BEFORE_UPDATE: tuple[Operation, ...] = ("logprobs", "values")


class Rank:
    """Hosts roles by name. Every rank of a pool gets the same calls in the same order: most of them are collective."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        platform_name: PlatformName,
        seed: int,
        progress: Progress | None = None,
        threads: int | None = None,
    ) -> None:
        """Prepare this process; the other ranks are met in `rendezvous`. progress: where passes over a shard are counted.

        threads: of this process; None is what it was started with.
        """
        self.rank, self.world_size, self.seed, self._progress = rank, world_size, seed, progress
        self.platform = get_platform(platform_name)
        _load(self.platform)
        _set_num_threads(self.platform, threads)
        self._timeout_s: float | None = None
        self._meet: socket.socket | None = None
        self._groups: dict[Layout, Groups] = {}
        self._engines: dict[str, Engine] = {}
        self._losses: dict[str, Loss] = {}
        self._pending: dict[str, PendingSave] = {}
        self._bases: dict[str, str] = {}
        self._peaks: dict[str, int] = {}

    def free_port(self) -> int:
        """A port of this node that is this rank's until `rendezvous`: the driver asks rank 0 where the ranks can meet."""
        self._meet = kept_port("")
        return int(self._meet.getsockname()[1])

    def rendezvous(self, address: str, port: int, timeout_s: float) -> None:
        """Join the process group at tcp://address:port (rank 0 listens there). timeout_s: longest wait in a collective."""
        from megarl.training.parallel import join_ranks

        join_ranks(self.rank, self.world_size, self.platform, address, port, timeout_s=timeout_s)
        if self._meet is not None:
            self._meet.close()
            self._meet = None
        self._timeout_s = timeout_s

    def groups_of(self, layout: Layout) -> Groups:
        """A layout's process groups, made when it is first asked for; collective."""
        from megarl.training.parallel import make_groups

        if self._timeout_s is None:
            raise MegarlError("This rank has not joined the others: call rendezvous first.")
        if layout.world_size != self.world_size:
            raise MegarlError(f"A layout of {layout.world_size} ranks was given to a pool of {self.world_size}.")
        if layout not in self._groups:
            self._groups[layout] = make_groups(layout, timeout_s=self._timeout_s, seed=self.seed)
        return self._groups[layout]

    def everyone(self) -> ProcessGroup | None:
        """The group of all ranks of the pool; None where there is one rank."""
        import torch.distributed as dist

        return dist.group.WORLD if self.world_size > 1 else None

    def build(self, role: str, spec: RoleSpec) -> None:
        """Build a role's model, at its own layout, with the weights of its HF folder."""
        from megarl.training.engine import Engine
        from megarl.training.losses import build_loss

        self._engines.pop(role, None)  # its memory, before another's is taken
        self._bases.pop(role, None)
        self._losses.pop(role, None)
        if spec.base_of is not None:
            self.engine(spec.base_of)
            self._bases[role] = spec.base_of
            return
        self._leave_unused_groups(spec.layout)
        config = load_model_config(spec.folder) if spec.load_weights else read_saved_config(spec.folder)
        if spec.head == "score":
            config = config.with_score_head()
        if spec.holds_tower and (spec.load_weights or not (config.vision and config.vision.tower)):
            config = with_tower(config, spec.folder)
        groups = self.groups_of(spec.layout)
        self._engines[role] = Engine(config, spec, groups, self.platform, self.seed, self._progress)
        if spec.objective is not None:
            self._losses[role] = build_loss(spec.objective, self.groups_of(spec.layout).sum_over_context)
        return_free_memory(self.platform)  # what loading took

    def _leave_unused_groups(self, wanted: Layout) -> None:
        """Close the groups of layouts that no role has any more."""
        used = {wanted, *(engine.groups.layout for engine in self._engines.values())}
        for layout in [layout for layout in self._groups if layout not in used]:
            self._groups.pop(layout).close()

    def engine(self, role: str) -> Engine:
        """The engine of a role. Raises MegarlError for a role that was not built."""
        if role not in self._engines:
            raise MegarlError(f"This rank hosts no role {role!r}; it hosts {sorted(self._engines)}.")
        return self._engines[role]

    def logprobs(
        self, role: str, shard: Shard, temperature: float | None = None, of: MiniBatches = "all"
    ) -> Column | None:
        """Log-probs of this rank's shard; None unless the rank answers for the shard in the role's layout.

        temperature: divides the logits; the role's own where not given. of: mini-batches; what is left out is NaN.
        """
        engine, first = self.engine(self._bases.get(role, role)), 0 if of == "all" else 1
        with self.watched(role, "logprobs"):
            wanted = Shard(shard.mini_batches[first:])
            column = engine.logprobs(wanted, temperature, adapters=role not in self._bases)
        if column is None or not is_lead(self.rank, engine.groups.layout):
            return None
        return [*(_not_numbers(mini) for mini in shard.mini_batches[:first]), *column]

    def top(self, role: str, shard: Shard, k: int) -> Column | None:
        """The k likeliest labels of each token (`Engine.top`); None unless the rank answers for the shard."""
        engine = self.engine(role)
        with self.watched(role, "logprobs"):
            column = engine.top(shard, k)
        return column if is_lead(self.rank, engine.groups.layout) else None

    def values(self, role: str, shard: Shard) -> Column | None:
        """What a score head says at each position; None unless the rank answers for the shard."""
        engine = self.engine(role)
        with self.watched(role, "values"):
            column = engine.values(shard)
        return column if is_lead(self.rank, engine.groups.layout) else None

    def update(self, role: str, shard: Shard, columns: dict[str, Column], kl: float = 0.0) -> dict[str, float]:
        """One optimizer step for each mini-batch of the shard; metrics over all ranks, the same on each.

        kl: nats, of policy and reference, for losses that ask for it.
        """
        with self.watched(role, "update"):
            return self.engine(role).update(shard, columns, self._loss(role).at(kl))

    def take_notes(self, role: str) -> list[str]:
        """What a user should read of the role's updates since the last call."""
        return self.engine(role).take_notes()

    def evaluate(self, role: str, shard: Shard, columns: dict[str, Column], kl: float = 0.0) -> dict[str, float]:
        """What the role's loss reports of the shard, without learning from it; as `update` otherwise."""
        with self.watched(role, "evaluate"):
            return self.engine(role).evaluate(shard, columns, self._loss(role).at(kl))

    def _loss(self, role: str) -> Loss:
        if role not in self._losses:
            raise MegarlError(f"Role {role!r} was built without an objective: it has nothing to learn by.")
        return self._losses[role]

    def save(self, role: str, folder: Path, *, wait: bool = True) -> None:
        """Write this rank's part of a distributed checkpoint into an existing, empty folder.

        wait: off to go on while it is written; the checkpoint is there after `finish_save`, which is due before the next.
        """
        self.finish_save(role)
        with self.watched(role, "save"):
            pending = self.engine(role).save(folder, async_save=not wait)
        if pending is not None:
            self._pending[role] = pending

    def finish_save(self, role: str) -> None:
        """Wait until the role's checkpoint that is being written is whole; nothing where none is."""
        pending = self._pending.pop(role, None)
        if pending is not None:
            pending.finish()

    def copy_weights(self, source: str, target: str) -> None:
        """Give the target role the weights of the source. Raises MegarlError where their layouts differ."""
        self.engine(target).copy_from(self.engine(source))

    def load(self, role: str, folder: Path) -> None:
        """Read this rank's part of a distributed checkpoint; the layout may differ from the one that saved it."""
        self.engine(role).load(folder)

    def export_hf(self, role: str, source: Path, target: Path) -> None:
        """Write the role's weights as an HF folder; config and tokenizer files are copied from `source`."""
        from megarl.models.hf_save import save_hf

        buckets = self.buckets(role, EXPORT_BUCKET_BYTES)
        if self.rank == 0:
            save_hf(buckets, self.engine(role).config, source, target, along=self.engine(role).along)
        else:
            for _ in buckets:
                continue  # takes part in the gathering

    def export_adapters(self, role: str, target: Path) -> None:
        """Write the role's LoRA adapters in PEFT's format."""
        self.engine(role).export_adapters(target)

    def buckets(self, role: str, bucket_bytes: int) -> Iterator[Bucket]:
        """The role's weights under HF names, bucket by bucket, on rank 0; every rank has to take every bucket."""
        from megarl.models.hf_gather import export_buckets

        with self.engine(role).gatherer() as gatherer:
            yield from export_buckets(gatherer, bucket_bytes)

    def sleep(self, role: str, parts: tuple[Part, ...] = PARTS) -> int:
        """Free the device memory of a role's parts; what needs them wakes them. Returns the bytes freed."""
        return self.engine(role).sleep(parts)

    def wake(self, role: str, parts: tuple[Part, ...] = PARTS) -> int:
        """Bring a role's parts back before something needs them. Returns the bytes taken."""
        return self.engine(role).wake(parts)

    @contextmanager
    def watched(self, role: str, operation: Operation) -> Iterator[None]:
        """Remember the most memory that this rank holds meanwhile, whatever it belongs to. Profiles show it by its name."""
        from torch.profiler import record_function

        name = f"{role}/{operation}"
        reset_peak_bytes(self.platform)
        with record_function(name):
            yield
        self._peaks[name] = max(peak_bytes(self.platform), self._peaks.get(name, 0))
        # What such a pass has freed serves the update that follows it; else others may need it, where it is much.
        if operation not in BEFORE_UPDATE or not self._losses:
            return_free_memory(self.platform, but_little=True)

    def take_peaks(self) -> dict[str, int]:
        """Peak bytes of each `role/operation` since the last call: of the device where it has its own, else resident."""
        peaks, self._peaks = self._peaks, {}
        return peaks

    def close(self) -> None:
        """Forget the roles and leave the process group."""
        from megarl.training.parallel import close_ranks

        self._engines.clear()
        self._bases.clear()
        self._groups.clear()
        close_ranks()


def _load(platform: Platform) -> None:
    """Import all that builds and trains models. Megatron would load wandb and TensorBoard, to report of what it does itself."""
    with without_collection(), as_if_missing("wandb"), as_if_missing("tensorboard"):
        from megarl.models.bootstrap import prepare_megatron

        prepare_megatron(platform)
        importlib.import_module("megarl.training.engine")


def _not_numbers(mini: MiniBatch) -> list[FloatArray]:
    """What stands in a column for a mini-batch that nobody reads there: used by mistake, it would be seen."""
    return [np.full(micro.num_tokens, np.nan, np.float32) for micro in mini.micro_batches]


def _set_num_threads(platform: Platform, threads: int | None) -> None:
    """Take these threads, or those that the process was started with; where nothing was said, what suits the platform."""
    import torch

    wanted = threads or os.environ.get("OMP_NUM_THREADS") or platform.env.get("OMP_NUM_THREADS")
    if wanted:
        torch.set_num_threads(int(wanted))
