"""The pool of Megatron ranks: one Ray actor a device, each hosting every Megatron role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from megarl.cluster.process import ProcessFacts, ProcessSpec, configure_process
from megarl.cluster.runtime import Runtime
from megarl.cluster.slots import Slot
from megarl.cluster.waits import Call, Pending, Waiter, Worker
from megarl.core.layout import Layout, dp_rank, is_lead
from megarl.core.platform import PlatformName
from megarl.core.progress import Progress
from megarl.core.types import Column, Shard
from megarl.data.pack import merge_columns, merge_shards, split_column
from megarl.sync.broadcast import BroadcastSender, ServerEndpoint, SyncReport
from megarl.training.rank import Rank
from megarl.training.spec import RoleSpec


class RankActor:
    """What runs in a rank's process: training's Rank, and the sending end of the weight sync."""

    def __init__(self, spec: ProcessSpec, rank: int, world_size: int, platform: PlatformName, seed: int) -> None:
        self._facts = configure_process(spec)
        self._rank = Rank(rank, world_size, platform, seed, Progress(spec.progress if rank == 0 else None))
        self._sender: BroadcastSender | None = None

    def facts(self) -> ProcessFacts:
        """Where this process runs."""
        return self._facts

    def free_port(self) -> int:
        """A port that is free on this node."""
        return self._rank.free_port()

    def rendezvous(self, host: str, port: int, timeout_s: float) -> None:
        """Join the ranks' process group."""
        self._rank.rendezvous(host, port, timeout_s)

    def build(self, role: str, spec: RoleSpec) -> None:
        """Build a role's model from its HF folder."""
        self._rank.build(role, spec)

    def logprobs(self, role: str, temperature: float | None, *shards: Shard) -> tuple[None, *tuple[Column | None, ...]]:
        """Log-probs of the labels of this rank's shards, one column each; only lead ranks return columns.

        temperature: the role's own where not given.
        """
        column = self._rank.logprobs(role, merge_shards(shards), temperature)
        return (None, *([None] * len(shards) if column is None else split_column(column, shards)))

    def values(self, role: str, *shards: Shard) -> tuple[None, *tuple[Column | None, ...]]:
        """What a score head says at each position of this rank's shards, one column each; only lead ranks return columns."""
        column = self._rank.values(role, merge_shards(shards))
        return (None, *([None] * len(shards) if column is None else split_column(column, shards)))

    def update(self, role: str, names: tuple[str, ...], num_shards: int, *parts: Any) -> dict[str, float]:
        """One optimizer step a mini-batch; metrics are the same on every rank.

        parts: the rank's shards, then for each name its columns, one a shard.
        """
        return self._rank.update(role, *_merged(names, num_shards, parts))

    def take_notes(self, role: str) -> list[str]:
        """What a user should read of the role's updates."""
        return self._rank.take_notes(role)

    def evaluate(self, role: str, names: tuple[str, ...], num_shards: int, *parts: Any) -> dict[str, float]:
        """What the role's loss reports, as `update` does; nothing is learned."""
        return self._rank.evaluate(role, *_merged(names, num_shards, parts))

    def save(self, role: str, folder: Path, wait: bool) -> None:
        """Write this rank's part of a distributed checkpoint. wait: off, it is written while other calls run."""
        self._rank.save(role, folder, wait=wait)

    def finish_save(self, role: str) -> None:
        """Wait until the role's checkpoint that is being written is whole."""
        self._rank.finish_save(role)

    def copy_weights(self, source: str, target: str) -> None:
        """Give the target role the weights of the source, of the same layout."""
        self._rank.copy_weights(source, target)

    def load(self, role: str, folder: Path) -> None:
        """Read this rank's part of a distributed checkpoint."""
        self._rank.load(role, folder)

    def export_hf(self, role: str, source: Path, target: Path) -> None:
        """Write the role's weights as an HF folder."""
        self._rank.export_hf(role, source, target)

    def export_adapters(self, role: str, target: Path) -> None:
        """Write the role's LoRA adapters in PEFT's format."""
        self._rank.export_adapters(role, target)

    def send_weights(
        self, role: str, version: int, servers: Sequence[ServerEndpoint], bucket_bytes: int, timeout_s: float
    ) -> SyncReport | None:
        """Gather the role's weights bucket by bucket and send them to the servers; rank 0 does, and reports."""
        if self._sender is None:
            platform = self._rank.platform
            self._sender = BroadcastSender(
                rank=self._rank.rank,
                host=self._facts.address,
                device=platform.device,
                backend=platform.backend,
                timeout_s=timeout_s,
                control=self._rank.everyone(),
            )
        with self._rank.watched(role, "send"):
            return self._sender.send(lambda: self._rank.buckets(role, bucket_bytes), version, servers)

    def take_peaks(self) -> dict[str, int]:
        """Peak bytes of this rank by `role/operation`, since the last call."""
        return self._rank.take_peaks()


def _merged(names: tuple[str, ...], num_shards: int, parts: Sequence[Any]) -> tuple[Shard, dict[str, Column]]:
    """Shards and columns of `RankActor.update` as those of one shard."""
    shards, rest = parts[:num_shards], parts[num_shards:]
    columns = {
        name: merge_columns(rest[index * num_shards : (index + 1) * num_shards]) for index, name in enumerate(names)
    }
    return merge_shards(shards), columns


@dataclass
class RankGroup:
    """The driver's handle of all ranks."""

    workers: tuple[Worker, ...]
    waiter: Waiter

    @classmethod
    def launch(
        cls, runtime: Runtime, slots: Sequence[Slot], pool: str, seed: int, waiter: Waiter, deadline_s: float
    ) -> LaunchingRanks:
        """Start one process on each slot; returns at once, so that others can start meanwhile."""
        starting = []
        for rank, slot in enumerate(slots):
            spec = runtime.process(f"{pool} {rank}", slot.node)
            actor = ray.remote(RankActor).options(**slot.options)
            handle = actor.remote(spec, rank, len(slots), runtime.platform.name, seed)
            starting.append(Worker(handle, spec, ProcessFacts(0, "?")))
        calls = [Call(worker, worker.handle.facts.remote()) for worker in starting]

        def with_facts(facts: list[ProcessFacts]) -> tuple[Worker, ...]:
            return tuple(Worker(worker.handle, worker.spec, fact) for worker, fact in zip(starting, facts, strict=True))

        return LaunchingRanks(Pending(waiter, calls, "start", "ranks", deadline_s, with_facts))

    def ask(
        self,
        remote: Callable[[Worker, int], Any],
        phase: str,
        role: str,
        deadline_s: float,
        only: Sequence[int] | None = None,
    ) -> Pending[list[Any]]:
        """Call every rank (or only some): the small results, in the order of the ranks."""
        chosen = range(len(self.workers)) if only is None else only
        calls = [Call(self.workers[rank], remote(self.workers[rank], rank)) for rank in chosen]
        return Pending(self.waiter, calls, phase, role, deadline_s, finish=list)

    def ask_columns(
        self,
        remote: Callable[[Worker, int], Sequence[Any]],
        layout: Layout,
        phase: str,
        role: str,
        deadline_s: float,
    ) -> Pending[tuple[Any, ...]]:
        """Call every rank for columns: references in the order of the shards, from the lead ranks; fetches none.

        remote: gives a reference to the call's outcome, then one for each of the rank's shards.
        """
        calls: list[Call] = []
        columns: dict[int, Sequence[Any]] = {}
        for rank, worker in enumerate(self.workers):
            status, *references = remote(worker, rank)
            calls.append(Call(worker, status))
            if is_lead(rank, layout):
                columns[dp_rank(rank, layout)] = references
        ordered = tuple(reference for index in sorted(columns) for reference in columns[index])
        return Pending(self.waiter, calls, phase, role, deadline_s, finish=lambda _: ordered)

    def take_peaks(self, deadline_s: float) -> Pending[dict[str, int]]:
        """Peak bytes of the fullest rank for each `role/operation` since the last call, of all that was asked until now."""

        def fullest(ranks: list[dict[str, int]]) -> dict[str, int]:
            peaks: dict[str, int] = {}
            for rank in ranks:
                peaks |= {name: max(held, peaks.get(name, 0)) for name, held in rank.items()}
            return peaks

        asked = self.ask(lambda worker, _: worker.handle.take_peaks.remote(), "memory", "ranks", deadline_s)
        return asked.then(fullest)

    def close(self) -> None:
        """End the ranks' processes."""
        for worker in self.workers:
            ray.kill(worker.handle)


@dataclass(frozen=True)
class LaunchingRanks:
    """Processes that are on their way."""

    starting: Pending[tuple[Worker, ...]]

    def ready(self, collective_s: float) -> RankGroup:
        """Wait until all are up, and join them in a process group.

        collective_s: longest time that a rank waits for the others in any later collective.
        """
        group = RankGroup(self.starting.wait(), self.starting.waiter)
        deadline_s = self.starting.deadline_s
        first = group.workers[0]
        ask_port = group.ask(lambda worker, _: worker.handle.free_port.remote(), "start", "ranks", deadline_s, only=[0])
        [port] = ask_port.wait()
        group.ask(
            lambda worker, _: worker.handle.rendezvous.remote(first.facts.address, port, collective_s),
            "rendezvous",
            "ranks",
            deadline_s,
        ).wait()
        return group
