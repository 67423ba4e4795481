"""How the servers of a pool and the router come up, all side by side; those that another life of the run has left are up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from megarl.cluster.healing import Member, Restarts, State
from megarl.cluster.kept import KeptPool
from megarl.cluster.server_actors import Started
from megarl.cluster.server_start import Starter
from megarl.cluster.servers import ServerPool, up
from megarl.cluster.waits import Call, Waiter, Worker
from megarl.core.errors import WorkerDiedError


@dataclass(frozen=True)
class LaunchingPool:
    """A pool whose processes are starting. starts: calls of those that are, members' before the router's."""

    starter: Starter
    members: list[Member]
    router: Worker
    starts: list[Call]
    waiter: Waiter
    restarts: Restarts
    kept: KeptPool | None = None

    @classmethod
    def launch(
        cls, starter: Starter, waiter: Waiter, restarts: Restarts, kept: KeptPool | None = None
    ) -> LaunchingPool:
        """Start all that are not up, a server a slot; returns at once, so that ranks can start meanwhile."""
        source, up_already = starter.source, {} if kept is None else kept.members
        members = [
            up_already.get(index) or Member(index, source.server(index), source.kind) for index in range(source.count)
        ]
        router = starter.router() if kept is None else kept.router
        coming = [part for member in members if member.server is None for part in member.parts]
        coming += [router] if kept is None else []
        starts = [Call(worker, worker.handle.start.remote(starter.deadline_s)) for worker in coming]
        return cls(starter, members, router, starts, waiter, restarts, kept)

    def endpoint(self) -> Any:
        """Reference to where the router will answer: known before it does."""
        return self.router.handle.endpoint.remote()

    def ready(self) -> ServerPool:
        """Wait until every server and the router are ready, and introduce them to each other."""
        started: list[Started] = self._wait(self.starts)
        answers = iter(started)
        for member in self.members:
            if member.server is None:
                up(member, list(islice(answers, len(member.parts))))
            member.state = State.SERVING  # nobody asks before the first weights were sent and verified
        if self.kept is None:
            router, endpoint = replace(self.router, facts=started[-1].facts), started[-1].endpoint
        else:
            router, endpoint = self.router, self.kept.endpoint
        servers = [member.server for member in self.members if member.server is not None]
        for trouble in self._wait([Call(router, router.handle.add.remote(server.endpoint)) for server in servers]):
            if trouble:
                raise WorkerDiedError(f"The router did not take in a server: {trouble}")
        return ServerPool(self.starter, self.members, router, endpoint, self.waiter, self.restarts)

    def _wait(self, calls: list[Call]) -> list[Any]:
        return self.waiter.wait(calls, phase="start", role="rollout", deadline_s=self.starter.deadline_s)
