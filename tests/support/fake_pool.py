"""A pool of servers on actors and calls that are fakes, and end when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megarl.cluster.healing import Member, Restarts, State
from megarl.cluster.process import ProcessFacts, ProcessSpec
from megarl.cluster.server_actors import Started
from megarl.cluster.servers import ServerPool, up
from megarl.cluster.waits import Call, Worker
from megarl.core.errors import DeadlineError
from megarl.serving.client import ServerEndpoint

SERVERS = 2
VERSION = 3


@dataclass(eq=False)
class FakeActor:
    """Answers calls by their names; what has no answer yet is open."""

    name: str
    told: list[tuple[str, Any]] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> SimpleNamespace:
            self.told.append((method, arguments))
            return SimpleNamespace(actor=self, method=method)

        # A reference has to be hashable, and each its own.
        return SimpleNamespace(remote=lambda *arguments: FakeRef(remote(*arguments)))

    def calls(self, method: str) -> list[Any]:
        return [arguments for name, arguments in self.told if name == method]


class FakeRef:
    """What a call of a fake actor will give."""

    def __init__(self, what: SimpleNamespace) -> None:
        self.actor: FakeActor = what.actor
        self.method: str = what.method


class FakeWaiter:
    """Keeps what is followed until the test lets it end. idle: what happens while somebody waits in `until`."""

    def __init__(self) -> None:
        self.watches: dict[FakeRef, Callable[[str], None]] = {}
        self.notices: dict[FakeRef, Callable[[str], None]] = {}
        self.followed: dict[Any, tuple[Sequence[Call], Callable[[list[Any], str], None]]] = {}
        self.idle: list[Callable[[], None]] = []
        self.deaths = SimpleNamespace(watch=lambda facts: None, how=lambda facts, otherwise: otherwise)

    def follow(self, calls: Sequence[Call], then: Callable[[list[Any], str], None], *, patient: bool = False) -> None:
        self.followed[calls[0].result] = (calls, then)

    def wait(self, calls: Sequence[Call], **_: Any) -> list[Any]:
        return [call.result.actor.answers.get(call.result.method, "") for call in calls]

    def until(self, done: Callable[[], bool], what: str, deadline_s: float) -> None:
        while not done():
            if not self.idle:
                raise DeadlineError(what)
            self.idle.pop(0)()

    def circumstances(self) -> str:
        return ""

    def finish(self, method: str, failure: str = "") -> int:
        """Let all followed calls of a method end; how many there were."""
        mine = [ref for ref in self.followed if ref.method == method]
        for ref in mine:
            calls, then = self.followed.pop(ref)
            results = [call.result.actor.answers.get(method, "") for call in calls]
            then([] if failure else results, failure)
        return len(mine)

    def die(self, actor: FakeActor, how: str = "killed\nits log") -> None:
        """Have an actor say that its process ended."""
        ref = next(ref for ref in self.watches if ref.actor is actor)
        self.watches.pop(ref)(how)


class FakeStarter:
    """Makes fake actors."""

    deadline_s = 60.0

    def __init__(self, parts: int = 1, *, offloaded: bool = False, external: bool = False) -> None:
        self.parts, self.offloaded = parts, offloaded
        self.comes_back, self.retries = ("is looked for again", False) if external else ("is started again", True)
        self.source, self.external = self, external
        self.made: list[FakeActor] = []
        self.ended: list[FakeActor] = []
        self.lost_slots: set[int] = set()
        self.ports: list[int | None] = []

    @property
    def count(self) -> int:
        return SERVERS

    @property
    def kind(self) -> str:
        return "sglang server"

    def lost(self, index: int) -> bool:
        return index in self.lost_slots

    def server(self, index: int) -> tuple[Worker, ...]:
        return tuple(self._make(f"server {index}") for _ in range(self.parts))

    def router(self, port: int | None = None) -> Worker:
        self.ports.append(port)
        return self._make("router")

    def end(self, worker: Worker) -> None:
        self.ended.append(worker.handle)

    def _make(self, name: str) -> Worker:
        actor = FakeActor(name)
        # Where the run does not start it, a server comes back at its address.
        url = f"http://far/{name}" if self.external else f"http://h:{9000 + len(self.made)}"
        endpoint = ServerEndpoint(f"sglang {name}", url, "key")
        actor.answers["start"] = Started(50 + len(self.made), ProcessFacts(1, "h"), endpoint)
        self.made.append(actor)
        return Worker(actor, ProcessSpec(name, Path("logs")), ProcessFacts(0, "?"))


@dataclass
class Stage:
    """A pool of two servers, with what stands around it. pushes: how often weights were sent."""

    starter: FakeStarter
    most: int = 8
    pushes: int = 0

    def __post_init__(self) -> None:
        self.waiter: Any = FakeWaiter()
        members = [Member(index, self.starter.server(index)) for index in range(SERVERS)]
        for member in members:
            up(member, [part.handle.answers["start"] for part in member.parts])
            member.state = State.SERVING
        fake: Any = self.starter
        router = fake.router()
        self.restarts = Restarts(self.most)
        endpoint = router.handle.answers["start"].endpoint
        self.pool = ServerPool(fake, members, router, endpoint, self.waiter, self.restarts)
        self.pool.refresh = self.push

    def push(self) -> None:
        """As WeightSync does."""
        self.pushes += 1
        self.pool.await_ready()
        self.pool.received([server.endpoint for server in self.pool.receivers()])
        self.pool.admit(VERSION)

    def states(self) -> list[State]:
        return [member.state for member in self.pool.members]

    def actor(self, index: int) -> FakeActor:
        actor: FakeActor = self.pool.members[index].parts[0].handle
        return actor

    def router(self) -> FakeActor:
        actor: FakeActor = self.pool.router.handle
        return actor
