"""The processes of a run as objects in this one. Each writes down what it is told, as far as that is more than the recipe."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megarl.cluster.process import ProcessFacts, ProcessSpec
from megarl.cluster.ranks import _merged
from megarl.cluster.rollout import CollectorActor, ProbeResult
from megarl.cluster.server_actors import Started
from megarl.core.layout import is_lead
from megarl.core.platform import get_platform
from megarl.core.types import Column, Shard, VersionSpan
from megarl.data.pack import merge_shards, split_column
from megarl.rewards.grade import Grade, failed
from megarl.serving.client import Generation, ServerEndpoint
from megarl.serving.router import RouterProcess, RouterSpec
from megarl.serving.sampling import Sampling
from megarl.serving.server import ProcessPlace, ServerProcess, ServerSpec
from megarl.sync.broadcast import SyncReport
from megarl.training.spec import RoleSpec
from tests.support.dry.learning import column_of, learn

END, LETTERS, VOCAB = 2, 20, 60


class Book:
    """What is written down. told: in order. specs: of each role, by its name. version: of the weights last sent."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.specs: dict[str, RoleSpec] = {}
        self.version = 0

    def note(self, *what: Any) -> None:
        """Write something down."""
        self.told.append(what)


class Rank:
    """A rank whose models say what `column_of` says, and whose updates are losses and gradients on these."""

    def __init__(self, book: Book, spec: ProcessSpec, rank: int, world_size: int, platform: str, seed: int) -> None:
        self._book, self._rank, self._name = book, rank, spec.name
        book.note("rank", spec.name, rank, world_size, platform, seed)

    def facts(self) -> ProcessFacts:
        return ProcessFacts(1, "host")

    def free_port(self) -> int:
        return 1

    def rendezvous(self, address: str, port: int, timeout_s: float) -> None:
        self._book.note("rendezvous", timeout_s)

    def build(self, role: str, spec: RoleSpec) -> None:
        self._book.note("build", role, self._name)
        self._book.specs[role] = spec

    def logprobs(self, role: str, temperature: float | None, *shards: Shard) -> tuple[Any, ...]:
        self._book.note("logprobs", role, temperature)
        return self._columns(role, shards)

    def values(self, role: str, *shards: Shard) -> tuple[Any, ...]:
        self._book.note("values", role)
        return self._columns(role, shards)

    def _columns(self, role: str, shards: Sequence[Shard]) -> tuple[Any, ...]:
        return (None, *split_column(column_of(role, merge_shards(shards)), shards))

    def update(self, role: str, names: tuple[str, ...], num_shards: int, *parts: Any) -> dict[str, float]:
        return self._learn("update", role, *_merged(names, num_shards, parts))

    def evaluate(self, role: str, names: tuple[str, ...], num_shards: int, *parts: Any) -> dict[str, float]:
        return self._learn("evaluate", role, *_merged(names, num_shards, parts))

    def _learn(self, method: str, role: str, shard: Shard, columns: dict[str, Column]) -> dict[str, float]:
        objective = self._book.specs[role].objective
        assert objective is not None, role
        if not is_lead(self._rank, self._book.specs[role].layout):
            return {}
        says = "later critic" if role == "critic" else "policy"
        self._book.note(method, role, self._rank, learn(objective, shard, columns, role=says))
        return {}

    def save(self, role: str, folder: Path, wait: bool) -> None:
        self._book.note("save", role, wait)
        (folder / "weights").touch()

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
        self, role: str, version: int, servers: Sequence[ServerEndpoint], bucket_bytes: int, timeout_s: float
    ) -> SyncReport:
        self._book.note("send", role, version, len(servers), bucket_bytes, timeout_s)
        self._book.version = version
        return SyncReport(version, tuple(server.name for server in servers), {}, 1, 1.0, 1)

    def take_peaks(self) -> dict[str, int]:
        return {"actor/update": 1}


class _Process:
    """A process that would be started: its command line, without ports and folders, and its environment."""

    def __init__(self, book: Book, process: Any, place: ProcessPlace, answer_s: float) -> None:
        self._book, self._process = book, process
        book.note("silence", process.name, answer_s)
        endpoint = process.command.endpoint
        argv = [word for word in process.command.argv if word not in (str(endpoint.port), place.host)]
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

    def watch(self) -> str:
        return "it has not ended"

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
        super().__init__(*arguments)

    async def notice(self) -> str:
        """The next line for people would be waited for until the run ends: calls here are done when they are made."""
        return ""

    async def verify(
        self, servers: list[ServerEndpoint], trainer: Column, tolerance: float, version: int, deadline_s: float
    ) -> ProbeResult:
        self._book.note("verify", len(servers), tolerance, version, deadline_s)
        return ProbeResult(0.0, {})


class Client:
    """In the place of the client of the router: answers at once, out of the prompt and how often it was asked."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._asked: Counter[bytes] = Counter()
        self._in_flight = 0

    async def generate(self, token_ids: Any, sampling: Sampling, deadline_s: float) -> Generation:
        """A response whose log-probs and end follow from its tokens."""
        self._in_flight += 1
        self._book.note(
            "generate",
            tuple(np.asarray(token_ids).tolist()),
            str(sampling.body()),
            sampling.routing,
            deadline_s,
            self._in_flight,
        )
        key = np.asarray(token_ids).tobytes()
        count = self._asked[key] if sampling.temperature else 0
        self._asked[key] += 1
        await asyncio.sleep(0)
        self._in_flight -= 1
        seed = int(np.sum(token_ids)) * 7 + count * 5
        length = 1 + seed % sampling.max_tokens
        tokens = np.array([LETTERS + (seed + 3 * at) % VOCAB for at in range(length)])
        if seed % 3:
            tokens[-1] = END
        return Generation(
            token_ids=tokens,
            logprobs=(-1.5 + np.sin(seed + np.arange(length))).astype(np.float32),
            text=f"{seed % 4}",
            finish="stop" if seed % 3 else "length",
            finish_message="",
            versions=(VersionSpan(self._book.version, 0, length),),
            prompt_tokens=len(token_ids),
            cached_tokens=0,
            routing=np.zeros((len(token_ids) + length - 1, 6), np.int16) if sampling.routing else None,
        )

    async def close(self) -> None:
        return None


class Pool:
    """In the place of the processes of a rule."""

    def __init__(self, book: Book, fn: str, workers: int, timeout_s: float, *, key: str) -> None:
        self._fn = fn
        book.note("rule", fn, workers, timeout_s)

    async def start(self) -> None:
        return None

    async def grade(self, prompt: str, response: str, answer: str, metadata: dict[str, Any], row: str = "") -> Grade:
        """Two functions differ, and a response's score depends on it, but for prompts that all answer equally badly.

        Some responses to one prompt get no grade.
        """
        if answer in ("6", "1009") and int(response) == 1:
            return failed("error: ValueError: no grade for this one")
        if sum(map(ord, answer)) % 3 == 0:
            return Grade(0.25)
        return Grade(((len(prompt) + len(answer) + int(response)) % 4 + len(self._fn) % 3) / 4)

    def oldest(self) -> None:
        return None

    async def close(self) -> None:
        return None


class Poster:
    """In the place of what posts to remote graders and judges."""

    def __init__(self, book: Book, url: str, key: str | None, *, timeout_s: float, retries: int) -> None:
        self.url, self._book, self._in_flight = url, book, 0
        book.note("poster", url, key, timeout_s, retries)

    async def post(self, body: dict[str, Any]) -> Any:
        """A judge's reply, or a number for each item."""
        self._in_flight += 1
        self._book.note("post", self.url, str(body), self._in_flight)
        for _ in range(3):
            await asyncio.sleep(0)
        self._in_flight -= 1
        if "items" in body:
            return {"rewards": [int(item["response"]) / 2 for item in body["items"]]}
        return {"choices": [{"message": {"content": f'Score: 4, mark 5, or {{"points": {len(str(body)) % 5}}}'}}]}

    async def close(self) -> None:
        return None


class Ref:
    """What a call gave."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Ray:
    """In the place of Ray: actors live here, and a call is done when it is made."""

    def __init__(self, classes: dict[type, Callable[..., Any]], loop: asyncio.AbstractEventLoop) -> None:
        self._classes, self._loop = classes, loop

    def remote(self, kind: type) -> Any:
        """As `ray.remote`."""
        return _Maker(self._classes[kind], self._loop)


class _Maker:
    def __init__(self, make: Callable[..., Any], loop: asyncio.AbstractEventLoop) -> None:
        self._make, self._loop = make, loop

    def options(self, **_: Any) -> _Maker:
        return self

    def remote(self, *arguments: Any) -> _Handle:
        return _Handle(self._make(*map(_value, arguments)), self._loop)


class _Handle:
    def __init__(self, actor: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._actor, self._loop = actor, loop

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self._actor, name), self._loop)


class _Method:
    def __init__(self, method: Callable[..., Any], loop: asyncio.AbstractEventLoop, num_returns: int = 1) -> None:
        self._method, self._loop, self._num_returns = method, loop, num_returns

    def options(self, num_returns: int) -> _Method:
        return _Method(self._method, self._loop, num_returns)

    def remote(self, *arguments: Any) -> Any:
        result = self._method(*map(_value, arguments))
        if inspect.iscoroutine(result):
            result = self._loop.run_until_complete(result)
        return Ref(result) if self._num_returns == 1 else [Ref(each) for each in result]


def _value(argument: Any) -> Any:
    return argument.value if isinstance(argument, Ref) else argument
