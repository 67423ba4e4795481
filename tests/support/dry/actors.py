"""The processes of a run as objects in this one. Each writes down what it is told, as far as that is more than the recipe."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from megarl.cluster.collectors import CollectorActor, ProbeResult
from megarl.cluster.process import ProcessFacts, ProcessSpec
from megarl.cluster.ranks import RankShards, merged
from megarl.cluster.server_actors import Started
from megarl.core.layout import is_lead
from megarl.core.platform import get_platform
from megarl.core.types import Block, Column, FloatArray, MiniBatches, Shard, ShardPlan
from megarl.serving.client import ServerEndpoint
from megarl.serving.external import ModelFacts
from megarl.serving.router import RouterProcess, RouterSpec
from megarl.serving.server import ProcessPlace, ServerProcess, ServerSpec
from megarl.sync.fetch import Fetched, Order
from megarl.sync.hash_report import HashReport
from megarl.sync.sending import Sending
from megarl.sync.session import SyncReport
from megarl.training.manifest import HF_FOLDER, Manifest
from megarl.training.spec import DpoObjective, KtoObjective, RewardObjective, RoleSpec, SftObjective
from tests.support.dry.learning import column_of, learn, top_of

EVALUATED = {SftObjective: "sft", RewardObjective: "rm", DpoObjective: "dpo", KtoObjective: "kto"}


class Differs(BaseException):
    """What was written down is no longer what is compared with: the run need not go on."""


class Book:
    """What is written down. told: in order. specs: of each role, by its name. version: of the weights last sent.

    asked: how often for each prompt. in_flight: requests at the servers, which are aborted with each of the cuts, and stand
    still while paused. expected: what `compare` compares with; None where everything is wanted.
    """

    def __init__(self, expected: Sequence[tuple[Any, ...]] | None = None) -> None:
        self.told: list[tuple[Any, ...]] = []
        self._expected, self._compared = expected, 0
        self.specs: dict[str, RoleSpec] = {}
        self.version = 0
        self.asked: Counter[bytes] = Counter()
        self.in_flight = self.cuts = 0
        self.paused = False

    def note(self, *what: Any) -> None:
        """Write something down."""
        self.told.append(what)

    def compare(self) -> None:
        """Raises Differs, once, where what came since the last call is other than expected."""
        first, self._compared = self._compared, len(self.told)
        if self._expected is not None and self.told[first:] != self._expected[first : self._compared]:
            self._expected = None  # what is cleaned up is not compared
            raise Differs


class Rank:
    """A rank whose models say what `column_of` says, and whose updates are losses and gradients on these."""

    def __init__(
        self, book: Book, spec: ProcessSpec, rank: int, world_size: int, platform: str, seed: int, threads: int | None
    ) -> None:
        self._book, self._rank, self._name = book, rank, spec.name
        book.note("rank", spec.name, rank, world_size, platform, seed)

    def facts(self) -> ProcessFacts:
        return ProcessFacts(1, "host")

    def free_port(self) -> int:
        return 1

    def rendezvous(self, address: str, port: int, timeout_s: float) -> None:
        self._book.note("rendezvous", timeout_s)

    def begin_profile(self, memory: bool) -> None:
        self._book.note("begin_profile", self._name, memory)

    def end_profile(self, file: Path) -> str:
        self._book.note("end_profile", file.name)
        return ""

    def build(self, role: str, spec: RoleSpec) -> None:
        self._book.note("build", role, self._name)
        self._book.specs[role] = spec

    def logprobs(
        self, role: str, temperature: float | None, of: MiniBatches, num_owners: int, *parts: ShardPlan | Block
    ) -> tuple[Any, ...]:
        self._book.note("logprobs", role, temperature, of)
        return self._columns(role, RankShards.of(num_owners, parts))

    def top(self, role: str, k: int, num_owners: int, *parts: ShardPlan | Block) -> tuple[Any, ...]:
        self._book.note("top", role, k)
        shards = RankShards.of(num_owners, parts)
        return (None, *shards.parts(top_of(role, shards.merged(), k)))

    def values(self, role: str, num_owners: int, *parts: ShardPlan | Block) -> tuple[Any, ...]:
        self._book.note("values", role)
        return self._columns(role, RankShards.of(num_owners, parts))

    def _columns(self, role: str, shards: RankShards) -> tuple[Any, ...]:
        return (None, *shards.parts(column_of(role, shards.merged())))

    def update(
        self, role: str, names: tuple[str, ...], kl: float, num_shards: int, num_owners: int, *parts: Any
    ) -> dict[str, float]:
        return self._learn("update", role, *merged(names, num_shards, num_owners, parts), kl)

    def evaluate(
        self, role: str, names: tuple[str, ...], kl: float, num_shards: int, num_owners: int, *parts: Any
    ) -> dict[str, float]:
        """A loss that goes down and up again, by what was learned before."""
        self._learn("evaluate", role, *merged(names, num_shards, num_owners, parts), kl)
        prefix = EVALUATED[type(self._book.specs[role].objective)]
        learned = sum(method == "update" for method, *_ in self._book.told)
        told = {"kto/log_ratio": 0.25 * learned} if prefix == "kto" else {}
        return {f"{prefix}/loss": float(learned * 7 % 4)} | told

    def _learn(self, method: str, role: str, shard: Shard, columns: dict[str, Column], kl: float) -> dict[str, float]:
        objective = self._book.specs[role].objective
        assert objective is not None, role
        if not is_lead(self._rank, self._book.specs[role].layout):
            return {}
        says = "later critic" if role == "critic" else "policy"
        self._book.note(method, role, self._rank, learn(objective, shard, columns, kl, role=says))
        return {}

    def save(self, role: str, folder: Path, wait: bool) -> None:
        self._book.note("save", role, wait)
        (folder / "weights").touch()
        spec = self._book.specs[role]
        if self._rank == 0:
            (folder / HF_FOLDER).mkdir()
            shutil.copyfile(spec.folder / "config.json", folder / HF_FOLDER / "config.json")
            Manifest(
                family="qwen3",
                architecture="Qwen3ForCausalLM",
                dtype=spec.dtype,
                step=0,
                layout=spec.layout,
                optimizer=None if spec.optimizer is None else spec.optimizer.model_dump(mode="json"),
                total_steps=spec.total_steps,
                lora=None if spec.lora is None else spec.lora.model_dump(mode="json"),
                versions={},
                tensors={},
                files={},
            ).write(folder)

    def finish_save(self, role: str) -> None:
        self._book.note("finish save", role)

    def load(self, role: str, folder: Path) -> None:
        self._book.note("load", role)

    def copy_weights(self, source: str, target: str) -> None:
        self._book.note("copy", source, target)

    def export_hf(self, role: str, source: Path, target: Path) -> None:
        self._book.note("export", role)

    def export_adapters(self, role: str, target: Path) -> None:
        self._book.note("export adapters", role)

    def send_weights(
        self,
        role: str,
        version: int,
        servers: Sequence[ServerEndpoint],
        sending: Sending,
        keep_kv: bool,
    ) -> SyncReport:
        told = (sending.transport, sending.writers, sending.bucket_bytes, sending.timeout_s)
        self._book.note("send", role, version, len(servers), *told, keep_kv)
        if sending.fetched is not None:
            self._book.note("write", sending.fetched.store.folder.parent, sending.fetched.in_place)
        self._book.version = version
        return SyncReport(version, tuple(server.name for server in servers), {}, 1, 1.0, 1)

    def compare_hashes(
        self, role: str, servers: Sequence[ServerEndpoint], dtype: str, sending: Sending, deadline_s: float
    ) -> HashReport:
        self._book.note("hashes", role, len(servers), dtype, sending.bucket_bytes, deadline_s)
        return HashReport(1, {}, {})

    def leave_servers(self, servers: Sequence[ServerEndpoint], deadline_s: float) -> dict[str, str]:
        self._book.note("leave", len(servers))
        return {}

    def take_peaks(self) -> dict[str, int]:
        return {"actor/update": 1}


class _Process:
    """A process that would be started: its command line, without ports and folders, and its environment."""

    def __init__(self, book: Book, process: Any, place: ProcessPlace, answer_s: float) -> None:
        self._book, self._process = book, process
        book.note("silence", process.name, answer_s)
        endpoint = process.command.endpoint
        words = process.command.argv
        ports = {str(endpoint.port), *(after for word, after in pairwise(words) if word == "--nccl-port")}
        argv = [word for word in words if word not in {*ports, place.host}]
        hidden = {"TMPDIR", *place.env}
        env = sorted(item for item in process.command.env.items() if item[0] not in hidden)
        book.note("process", process.name, *argv, *env)

    def facts(self) -> ProcessFacts:
        return ProcessFacts(1, "host")

    def start(self, deadline_s: float) -> Started:
        self._book.note("start", self._process.name, deadline_s)
        return Started(1, ProcessFacts(1, "host"), self.endpoint())

    def endpoint(self) -> ServerEndpoint:
        endpoint: ServerEndpoint = self._process.endpoint
        return endpoint

    async def watch(self) -> str:
        await asyncio.Event().wait()
        return ""

    def stop(self) -> None:
        return None


class Server(_Process):
    """Beside a server that is not started."""

    def __init__(
        self,
        book: Book,
        spec: ProcessSpec,
        registry: Path,
        server: ServerSpec,
        platform: Any,
        place: ProcessPlace,
        answer_s: float,
    ) -> None:
        super().__init__(book, ServerProcess(spec.name, server, get_platform(platform), place), place, answer_s)

    def sleep(self, parts: tuple[str, ...], deadline_s: float) -> str:
        self._book.note("rest", self._process.name, parts, deadline_s)
        return ""

    def wake(self, parts: tuple[str, ...], serve: bool, deadline_s: float) -> str:
        self._book.note("wake", self._process.name, parts, serve, deadline_s)
        return ""

    def fetch(self, order: Order) -> Fetched:
        self._book.note("fetch", self._process.name, order.version, order.flush_cache, order.timeout_s)
        return Fetched()

    def sees(self, order: Order) -> str:
        self._book.note("see", self._process.name, order.version)
        return ""

    def pause(self, keep_kv: bool, deadline_s: float) -> str:
        self._book.note("pause", self._process.name, keep_kv, deadline_s)
        self._book.paused = True
        return ""

    def resume(self, deadline_s: float) -> str:
        self._book.note("resume", self._process.name, deadline_s)
        self._book.paused = False
        return ""


class External:
    """Beside a server that somebody else would have started."""

    def __init__(
        self, book: Book, spec: ProcessSpec, server: ServerEndpoint, expected: ModelFacts, answer_s: float
    ) -> None:
        self._book, self._server = book, server
        book.note("external", server.name, server.url, server.api_key, answer_s)

    def start(self, deadline_s: float) -> Started:
        self._book.note("find", self._server.name, deadline_s)
        return Started(0, ProcessFacts(1, "host"), self._server)

    async def watch(self) -> str:
        await asyncio.Event().wait()
        return ""

    def fetch(self, order: Order) -> Fetched:
        self._book.note("fetch", self._server.name, order.version, order.flush_cache, order.timeout_s)
        return Fetched()

    def pause(self, keep_kv: bool, deadline_s: float) -> str:
        self._book.note("pause", self._server.name, keep_kv, deadline_s)
        self._book.paused = True
        return ""

    def resume(self, deadline_s: float) -> str:
        self._book.note("resume", self._server.name, deadline_s)
        self._book.paused = False
        return ""

    def stop(self) -> None:
        self._book.note("let go", self._server.name)


class Router(_Process):
    """Beside a router that is not started."""

    def __init__(
        self, book: Book, spec: ProcessSpec, registry: Path, router: RouterSpec, place: ProcessPlace, answer_s: float
    ) -> None:
        process = RouterProcess(router, place)
        argv = process.command.argv
        metrics_port = argv[argv.index("--prometheus-port") + 1]
        object.__setattr__(process.command, "argv", tuple(word for word in argv if word != metrics_port))
        super().__init__(book, process, place, answer_s)

    def add(self, server: ServerEndpoint) -> str:
        return ""


class Collector(CollectorActor):
    """The collector itself; what it would ask servers about a sync is noted instead."""

    def __init__(self, book: Book, *arguments: Any) -> None:
        self._book = book
        book.note("collector", *arguments[3:])
        super().__init__(*arguments)

    async def verify(
        self, servers: list[ServerEndpoint], trainer: FloatArray, tolerance: float, version: int, deadline_s: float
    ) -> ProbeResult:
        self._book.note("verify", len(servers), tolerance, version, deadline_s)
        return ProbeResult(0.0, {})
