"""Typed handles of the Megatron roles: what the loop talks to. Methods take and return references, never tokens.

What a step asks of a role begins at once and is waited for later: roles of different pools work at the same time, those of
one pool in the order in which they were asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.cluster.ranks import RankGroup
from megarl.cluster.waits import Pending
from megarl.core.layout import Layout, dp_rank
from megarl.core.log import get_logger
from megarl.core.pending import Finished
from megarl.core.types import TEACHER_LOGPROBS, TEACHER_TOP, BatchInfo, MiniBatches
from megarl.recipe.run import Deadlines
from megarl.training.spec import NEARLY_ALL, RoleSpec

log = get_logger(__name__)

# [shard][owner]: references to what lies in the object store of a column, in the order of the owner's block of the shard.
ColumnRefs = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Batch:
    """The driver's handle of a step's samples: references, and counts.

    plans: one a shard. blocks: [shard][owner]; every shard has a block of every owner. numbers: one an owner, what its
    advantages need to know of its samples; none where nobody asks for advantages. mismatched: the prompts of labelled answers
    before other answers; None where the rows are no such answers. columns: those that came with the samples, by name.
    """

    plans: tuple[Any, ...]
    blocks: tuple[tuple[Any, ...], ...]
    info: BatchInfo
    numbers: tuple[Any, ...] = ()
    mismatched: Batch | None = None
    columns: Mapping[str, ColumnRefs] = field(default_factory=dict)

    @property
    def num_owners(self) -> int:
        """Processes that hold the samples."""
        return len(self.blocks[0])


class AskedTeacher:
    """A teacher behind an address: collectors have asked it, and what it said came with the samples."""

    def logprobs(self, batch: Batch) -> Finished[ColumnRefs]:
        """Of every label that is trained on."""
        return Finished(batch.columns[TEACHER_LOGPROBS])

    def top(self, batch: Batch, k: int) -> Finished[ColumnRefs]:
        """At every label that is trained on the k likeliest ones, as of Role."""
        return Finished(batch.columns[TEACHER_TOP])


@dataclass(frozen=True)
class Role:
    """A role that ranks host. reads: the columns that its update learns from; none where it stands still."""

    name: str
    ranks: RankGroup
    layout: Layout
    deadlines: Deadlines
    reads: frozenset[str] = frozenset()

    def _mine(self, rank: int, references: Sequence[Any]) -> Sequence[Any]:
        """A rank's part of references, one a shard: layouts may have fewer data-parallel ranks than there are shards."""
        each, rest = divmod(len(references), self.layout.dp)
        assert rest == 0, (len(references), self.layout)
        first = dp_rank(rank, self.layout) * each
        return references[first : first + each]

    def _parts(self, rank: int, batch: Batch) -> list[Any]:
        """A rank's shards: of each its plan, then its blocks."""
        shards = zip(self._mine(rank, batch.plans), self._mine(rank, batch.blocks), strict=True)
        return [reference for plan, blocks in shards for reference in (plan, *blocks)]

    def _num_columns(self, batch: Batch) -> int:
        """Arrays that each rank returns of a column."""
        return len(batch.plans) // self.layout.dp * batch.num_owners

    def build(self, spec: RoleSpec) -> Pending[Any]:
        """Build the model on every rank from its HF folder."""
        return self.ranks.ask(
            lambda worker, _: worker.handle.build.remote(self.name, spec), "build", self.name, self.deadlines.start_s
        )

    def logprobs(self, batch: Batch, of: MiniBatches = "all") -> Pending[ColumnRefs]:
        """Log-probs of every label of these mini-batches, natural log, of the temperature-scaled distribution; else NaN."""
        return self._columns("logprobs", "log-probs", batch, None, of)

    def top(self, batch: Batch, k: int) -> Pending[ColumnRefs]:
        """At every label of the batch the k likeliest ones, and the log-probs of these and of all others together."""
        return self._columns("top", "log-probs", batch, k)

    def values(self, batch: Batch) -> Pending[ColumnRefs]:
        """What a score head says at every position of the batch."""
        return self._columns("values", "values", batch)

    def _columns(self, method: str, phase: str, batch: Batch, *settings: int | str | None) -> Pending[ColumnRefs]:
        returns = 1 + self._num_columns(batch)
        return self.ranks.ask_columns(
            lambda worker, rank: (
                getattr(worker.handle, method)
                .options(num_returns=returns)
                .remote(self.name, *settings, batch.num_owners, *self._parts(rank, batch))
            ),
            self.layout,
            batch.num_owners,
            phase,
            self.name,
            self.deadlines.train_s,
        )

    def update(self, batch: Batch, columns: dict[str, ColumnRefs], kl: float = 0.0) -> Pending[dict[str, float]]:
        """One optimizer step a mini-batch; returns metrics, reduced over all ranks. Columns it does not read stay away.

        kl: nats, of policy and reference, for losses that ask for it.
        """
        return self._metrics("update", batch, columns, kl).then(self._told)

    def _told(self, metrics: dict[str, float]) -> dict[str, float]:
        """The same, once a user has been told what the ranks say of them."""
        if any(name.endswith("/grad_share_max") and share > NEARLY_ALL for name, share in metrics.items()):
            asked = self.ranks.ask(
                lambda worker, _: worker.handle.take_notes.remote(self.name),
                "update",
                self.name,
                self.deadlines.train_s,
                only=[0],
            )
            for note in asked.wait()[0]:
                log.warning("%s: %s", self.name, note)
        return metrics

    def evaluate(self, batch: Batch, columns: dict[str, ColumnRefs], kl: float = 0.0) -> Pending[dict[str, float]]:
        """What the role's loss reports of the batch, as `update` does; nothing is learned."""
        return self._metrics("evaluate", batch, columns, kl)

    def _metrics(
        self, method: str, batch: Batch, columns: dict[str, ColumnRefs], kl: float
    ) -> Pending[dict[str, float]]:
        names = tuple(name for name in columns if name in self.reads)

        def remote(worker: Any, rank: int) -> Any:
            mine = [part for name in names for shard in self._mine(rank, columns[name]) for part in shard]
            num_shards, parts = len(batch.plans) // self.layout.dp, self._parts(rank, batch)
            return getattr(worker.handle, method).remote(
                self.name, names, kl, num_shards, batch.num_owners, *parts, *mine
            )

        asked = self.ranks.ask(remote, method, self.name, self.deadlines.train_s)
        return asked.then(lambda results: results[0])

    def copy_from(self, other: Role) -> None:
        """Take the weights of a role of the same layout."""
        self.ranks.ask(
            lambda worker, _: worker.handle.copy_weights.remote(other.name, self.name),
            "refresh",
            self.name,
            self.deadlines.train_s,
        ).wait()

    def save(self, folder: Path, *, wait: bool = True) -> None:
        """Write a distributed checkpoint: weights, optimizer, schedule. wait: off, it is whole after `finish_save`."""
        self.ranks.ask(
            lambda worker, _: worker.handle.save.remote(self.name, folder, wait),
            "save",
            self.name,
            self.deadlines.save_s,
        ).wait()

    def finish_save(self) -> Pending[Any]:
        """Begin to wait for a checkpoint that is being written; whole it is in the end."""
        return self.ranks.ask(
            lambda worker, _: worker.handle.finish_save.remote(self.name), "save", self.name, self.deadlines.save_s
        )

    def load(self, folder: Path) -> None:
        """Read a distributed checkpoint."""
        self.ranks.ask(
            lambda worker, _: worker.handle.load.remote(self.name, folder), "load", self.name, self.deadlines.save_s
        ).wait()

    def export(self, source: Path, target: Path) -> None:
        """Write the weights as an HF folder; config and tokenizer come from `source`."""
        self.ranks.ask(
            lambda worker, _: worker.handle.export_hf.remote(self.name, source, target),
            "export",
            self.name,
            self.deadlines.save_s,
        ).wait()

    def export_adapters(self, target: Path) -> None:
        """Write the LoRA adapters in PEFT's format."""
        self.ranks.ask(
            lambda worker, _: worker.handle.export_adapters.remote(self.name, target),
            "export",
            self.name,
            self.deadlines.save_s,
        ).wait()
