"""The pool of Megatron ranks: one Ray actor a device, each hosting every Megatron role.

The driver imports this too, and has no use for torch: what needs it is imported by the ranks alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from megarl.cluster.process import ProcessFacts, ProcessSpec, configure_process
from megarl.cluster.runtime import Runtime
from megarl.cluster.slots import Slot
from megarl.cluster.waits import Call, Pending, Waiter, Worker
from megarl.core.layout import Layout, dp_rank, is_lead
from megarl.core.platform import PlatformName
from megarl.core.progress import Progress
from megarl.core.types import Block, Column, FloatArray, MiniBatches, Shard, ShardPlan
from megarl.data.pack import assemble, join_columns, merge_columns, merge_shards, split_column
from megarl.models.hf_dtypes import ModelDtype
from megarl.serving.client import ServerEndpoint
from megarl.sync.hash_report import HashReport
from megarl.sync.sending import Sending
from megarl.sync.session import SyncReport
from megarl.training.collectives import answer
from megarl.training.rank import Rank
from megarl.training.spec import RoleSpec

if TYPE_CHECKING:
    from megarl.sync.transport import Transport
    from megarl.training.step_profile import StepProfile


@dataclass(frozen=True)
class RankShards:
    """The shards of a step that one rank works on, as they travel. blocks: [shard][owner]."""

    plans: tuple[ShardPlan, ...]
    blocks: tuple[tuple[Block, ...], ...]

    @classmethod
    def of(cls, num_owners: int, parts: Sequence[Any]) -> RankShards:
        """parts: of each shard its plan, then the block of each owner."""
        each = 1 + num_owners
        assert len(parts) % each == 0, (len(parts), num_owners)
        return cls(tuple(parts[::each]), tuple(tuple(parts[at + 1 : at + each]) for at in range(0, len(parts), each)))

    def merged(self) -> Shard:
        """All as one shard."""
        return merge_shards([assemble(*each) for each in zip(self.plans, self.blocks, strict=True)])

    def column(self, parts: Sequence[FloatArray]) -> Column:
        """A column of `merged`. parts: of each shard, one array an owner."""
        each = len(self.blocks[0])
        assert len(parts) == len(self.plans) * each, (len(parts), len(self.plans), each)
        return merge_columns(
            [
                join_columns(plan, blocks, parts[index * each : (index + 1) * each])
                for index, (plan, blocks) in enumerate(zip(self.plans, self.blocks, strict=True))
            ]
        )

    def parts(self, column: Column | None) -> list[FloatArray | None]:
        """What is sent of a column of `merged`, as `column` takes it; as many None where the rank gives no columns."""
        if column is None:
            return [None for blocks in self.blocks for _ in blocks]
        return [part for shard in split_column(column, self.plans, self.blocks) for part in shard]


class RankActor:
    """What runs in a rank's process: training's Rank, and the sending end of the weight sync.

    Shards come as `RankShards.of` takes them, and columns go as its `parts`: one array a shard and owner.
    """

    def __init__(
        self, spec: ProcessSpec, rank: int, world_size: int, platform: PlatformName, seed: int, threads: int | None
    ) -> None:
        self._facts = configure_process(spec)
        answer(spec.collectives)
        self._rank = Rank(rank, world_size, platform, seed, Progress(spec.progress if rank == 0 else None), threads)
        self._sending: tuple[Sending, Transport] | None = None
        self._profile: StepProfile | None = None
        importlib.import_module("megarl.sync.transport")  # while others start, and not in the first sync

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

    def logprobs(
        self, role: str, temperature: float | None, of: MiniBatches, num_owners: int, *parts: ShardPlan | Block
    ) -> tuple[None, *tuple[FloatArray | None, ...]]:
        """Log-probs of the labels of this rank's shards; only lead ranks return columns.

        temperature: the role's own where not given. of: mini-batches; what is left out is NaN.
        """
        shards = RankShards.of(num_owners, parts)
        return (None, *shards.parts(self._rank.logprobs(role, shards.merged(), temperature, of)))

    def top(
        self, role: str, k: int, num_owners: int, *parts: ShardPlan | Block
    ) -> tuple[None, *tuple[FloatArray | None, ...]]:
        """The k likeliest labels of each token of this rank's shards, and their log-probs; only lead ranks return columns."""
        shards = RankShards.of(num_owners, parts)
        return (None, *shards.parts(self._rank.top(role, shards.merged(), k)))

    def values(
        self, role: str, num_owners: int, *parts: ShardPlan | Block
    ) -> tuple[None, *tuple[FloatArray | None, ...]]:
        """What a score head says at each position of this rank's shards; only lead ranks return columns."""
        shards = RankShards.of(num_owners, parts)
        return (None, *shards.parts(self._rank.values(role, shards.merged())))

    def update(
        self, role: str, names: tuple[str, ...], kl: float, num_shards: int, num_owners: int, *parts: Any
    ) -> dict[str, float]:
        """One optimizer step a mini-batch; metrics are the same on every rank.

        parts: the rank's shards, then for each name its column.
        """
        return self._rank.update(role, *merged(names, num_shards, num_owners, parts), kl)

    def take_notes(self, role: str) -> list[str]:
        """What a user should read of the role's updates."""
        return self._rank.take_notes(role)

    def evaluate(
        self, role: str, names: tuple[str, ...], kl: float, num_shards: int, num_owners: int, *parts: Any
    ) -> dict[str, float]:
        """What the role's loss reports, as `update` does; nothing is learned."""
        return self._rank.evaluate(role, *merged(names, num_shards, num_owners, parts), kl)

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
        self,
        role: str,
        version: int,
        servers: Sequence[ServerEndpoint],
        sending: Sending,
        keep_kv: bool,
    ) -> SyncReport | None:
        """Send the role's weights to the servers, together with all other ranks; rank 0 leads, and reports.

        keep_kv: servers keep what they computed with the old weights, for requests that they hold.
        """
        transport = self._transport(sending)
        with self._rank.watched(role, "send"):
            return transport.send(self._rank.engine(role), version, servers, flush_cache=not keep_kv)

    def compare_hashes(
        self, role: str, servers: Sequence[ServerEndpoint], dtype: ModelDtype, sending: Sending, deadline_s: float
    ) -> HashReport | None:
        """Compare the role's weights with the servers' by hashes, together with all other ranks; rank 0 reports.

        dtype: of the weights at the servers.
        """
        from megarl.sync.hashes import compare

        with self._rank.watched(role, "send"):
            buckets = self._rank.buckets(role, sending.bucket_bytes)
            if self._rank.rank == 0:
                return compare(buckets, self._rank.engine(role).config, servers, dtype, self._rank.platform, deadline_s)
            for _ in buckets:
                continue
        return None

    def _transport(self, sending: Sending) -> Transport:
        """What is kept from sync to sync, as long as it is to send the same way."""
        if self._sending is not None and self._sending[0] == sending:
            return self._sending[1]
        from megarl.sync.transport import make_transport

        if self._sending is not None:
            self._sending[1].close()
        platform = self._rank.platform
        made = make_transport(
            sending,
            rank=self._rank.rank,
            host=self._facts.address,
            platform=platform,
            control=self._rank.everyone(),
        )
        self._sending = sending, made
        return made

    def begin_profile(self, memory: bool) -> None:
        """Have torch's profiler watch this process from here on. memory: also what is allocated and freed."""
        from megarl.training.step_profile import StepProfile

        self._profile = StepProfile(memory=memory)

    def end_profile(self, file: Path) -> str:
        """Write what it saw; what went wrong with that, or nothing. Called after begin_profile."""
        profile, self._profile = self._profile, None
        assert profile is not None
        return profile.end(file)

    def leave_servers(self, servers: Sequence[ServerEndpoint], deadline_s: float) -> dict[str, str]:
        """Give up what servers and this rank keep of each other from sync to sync; which did not, and why. For rank 0."""
        return {} if self._sending is None else self._sending[1].leave(servers, deadline_s)

    def take_peaks(self) -> dict[str, int]:
        """Peak bytes of this rank by `role/operation`, since the last call."""
        return self._rank.take_peaks()


def merged(
    names: tuple[str, ...], num_shards: int, num_owners: int, parts: Sequence[Any]
) -> tuple[Shard, dict[str, Column]]:
    """What `RankActor.update` is given, as one shard and its columns."""
    first, each = num_shards * (1 + num_owners), num_shards * num_owners
    assert len(parts) == first + len(names) * each, (len(parts), names, num_shards, num_owners)
    shards, columns = RankShards.of(num_owners, parts[:first]), parts[first:]
    return shards.merged(), {
        name: shards.column(columns[index * each : (index + 1) * each]) for index, name in enumerate(names)
    }


@dataclass
class RankGroup:
    """The driver's handle of all ranks."""

    workers: tuple[Worker, ...]
    waiter: Waiter

    @classmethod
    def launch(
        cls,
        runtime: Runtime,
        slots: Sequence[Slot],
        pool: str,
        seed: int,
        waiter: Waiter,
        deadline_s: float,
        threads: int | None = None,
    ) -> LaunchingRanks:
        """Start one process on each slot; returns at once, so that others can start meanwhile. threads: of each."""
        starting = []
        for rank, slot in enumerate(slots):
            spec = runtime.process(f"{pool} {rank}", slot.node)
            actor = ray.remote(RankActor).options(**slot.options)
            handle = actor.remote(spec, rank, len(slots), runtime.platform.name, seed, threads)
            starting.append(Worker(handle, spec))
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
        num_owners: int,
        phase: str,
        role: str,
        deadline_s: float,
    ) -> Pending[tuple[tuple[Any, ...], ...]]:
        """Call every rank for columns: references [shard][owner], from the lead ranks; fetches none.

        remote: gives a reference to the call's outcome, then one for each owner of each of the rank's shards.
        """
        calls: list[Call] = []
        columns: dict[int, list[tuple[Any, ...]]] = {}
        for rank, worker in enumerate(self.workers):
            status, *references = remote(worker, rank)
            calls.append(Call(worker, status))
            if is_lead(rank, layout):
                columns[dp_rank(rank, layout)] = list(zip(*[iter(references)] * num_owners, strict=True))
        ordered = tuple(shard for index in sorted(columns) for shard in columns[index])
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
