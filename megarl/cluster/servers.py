"""The processes that generate: an actor beside every SGLang server, and one beside the router. Not for samples."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

from megarl.cluster.nodes import Node
from megarl.cluster.process import LOOPBACK, ProcessFacts, ProcessSpec, configure_process
from megarl.cluster.runtime import Runtime
from megarl.cluster.seats import beside, reserve, seat_on
from megarl.cluster.waits import Call, Waiter, Worker
from megarl.core.errors import WorkerDiedError
from megarl.core.janitor import RUN_ID_VARIABLE, register_segments
from megarl.core.log import get_logger
from megarl.core.platform import PlatformName, get_platform
from megarl.rollout.client import ServerEndpoint
from megarl.rollout.process import ManagedProcess
from megarl.rollout.router import RouterProcess, RouterSpec
from megarl.rollout.server import ProcessPlace, ServerProcess, ServerSpec

log = get_logger(__name__)

# Longest select() of a supervisor that waits for its process to end; then it waits again.
WATCH_S = 3600.0


class _Supervisor:
    """Starts one subprocess and waits for it. Subprocesses die with the thread that starts them: the event loop's."""

    def __init__(self, spec: ProcessSpec, registry: Path, process: ManagedProcess) -> None:
        self._facts = configure_process(spec)
        self._registry = registry
        self._process = process

    async def facts(self) -> ProcessFacts:
        """Where this process runs."""
        return self._facts

    async def start(self, deadline_s: float) -> int:
        """Start the subprocess and wait until it is ready; returns its pid."""
        self._process.start()
        await asyncio.to_thread(self._process.wait_ready, deadline_s)
        register_segments(self._registry, self._process.shm_names())
        return self._process.pid

    async def watch(self) -> str:
        """Returns when the subprocess has ended: how, with the end of its log."""
        while not await asyncio.to_thread(self._process.wait_exit, WATCH_S):
            continue
        return self._process.epitaph()

    async def stop(self) -> None:
        """End the subprocess and what it holds."""
        await asyncio.to_thread(self._process.stop)


class ServerActor(_Supervisor):
    """Beside one SGLang server."""

    def __init__(
        self, spec: ProcessSpec, registry: Path, server: ServerSpec, platform: PlatformName, place: ProcessPlace
    ) -> None:
        self._server = ServerProcess(f"sglang {spec.name}", server, get_platform(platform), place)
        super().__init__(spec, registry, self._server)

    async def endpoint(self) -> ServerEndpoint:
        """Where the server answers."""
        return self._server.endpoint


class RouterActor(_Supervisor):
    """Beside the router."""

    def __init__(self, spec: ProcessSpec, registry: Path, router: RouterSpec, place: ProcessPlace) -> None:
        self._router = RouterProcess(router, place, name=f"sglang_{spec.name}")
        super().__init__(spec, registry, self._router)

    async def endpoint(self) -> ServerEndpoint:
        """Where the router answers."""
        return self._router.endpoint

    async def add(self, server: ServerEndpoint) -> None:
        """Send requests to this server too."""
        await asyncio.to_thread(self._router.add, server)

    async def remove(self, url: str) -> None:
        """Send nothing more to this server."""
        await asyncio.to_thread(self._router.remove, url)


@dataclass(frozen=True)
class Server:
    """One member of the pool."""

    worker: Worker
    endpoint: ServerEndpoint
    pid: int  # of the SGLang process itself


class ServerPool:
    """The servers that serve, and the router in front. A server that dies or fails an update leaves the pool."""

    def __init__(self, servers: list[Server], router: Worker, router_endpoint: ServerEndpoint, waiter: Waiter) -> None:
        self.servers = servers
        self.router = router
        self.endpoint = router_endpoint
        self._waiter = waiter
        for server in servers:
            waiter.watches[server.worker.handle.watch.remote()] = partial(self.drop, server.endpoint)
        waiter.watches[router.handle.watch.remote()] = self._router_ended

    @classmethod
    def launch(
        cls, runtime: Runtime, spec: ServerSpec, count: int, request_timeout_s: float, waiter: Waiter, deadline_s: float
    ) -> LaunchingPool:
        """Start all processes side by side; returns at once, so that ranks can start meanwhile."""
        nodes = runtime.nodes.members
        seats = (
            reserve(runtime.platform, nodes, count, spec.tp)
            if runtime.platform.has_device_memory
            else beside(nodes, runtime.seats, count)
        )
        workers = []
        for index, seat in enumerate(seats):
            process = runtime.process(f"server {index}", seat.node)
            place = _place(runtime, seat.node)
            handle = (
                ray.remote(ServerActor)
                .options(**seat.options)
                .remote(process, seat.node.registry, spec, runtime.platform.name, place)
            )
            workers.append(Worker(handle, process, ProcessFacts(0, "?")))
        process = runtime.process("router")
        place = _place(runtime, runtime.here)
        handle = (
            ray.remote(RouterActor)
            .options(**seat_on(runtime.here).options)
            .remote(process, runtime.here.registry, RouterSpec(request_timeout_s=request_timeout_s), place)
        )
        router = Worker(handle, process, ProcessFacts(0, "?"))
        starts = [Call(worker, worker.handle.start.remote(deadline_s)) for worker in [*workers, router]]
        return LaunchingPool(workers, router, starts, waiter, deadline_s)

    def drop(self, endpoint: ServerEndpoint, reason: str) -> None:
        """Take a server out of the pool. Raises WorkerDiedError when it was the last."""
        gone = next((server for server in self.servers if server.endpoint.url == endpoint.url), None)
        if gone is None:
            return
        self.servers.remove(gone)
        if not self.servers:
            raise WorkerDiedError(
                f"{endpoint.name} ({endpoint.url}, pid {gone.pid}) left the pool, and no server remains. {reason}"
            )
        log.warning("%s left the pool, %d remain: %s", endpoint.name, len(self.servers), reason.splitlines()[0])
        # Nobody waits for these: the router's own health checks pass over a server that is gone.
        self.router.handle.remove.remote(endpoint.url)
        gone.worker.handle.stop.remote()

    def _router_ended(self, how: str) -> None:
        raise WorkerDiedError(f"The router ({self.endpoint.url}) ended. {how}")

    def close(self, timeout_s: float = 15.0) -> None:
        """Ask every process to end, side by side; what does not is killed with the run."""
        workers = [*(server.worker for server in self.servers), self.router]
        self._waiter.watches.clear()
        ray.wait([worker.handle.stop.remote() for worker in workers], num_returns=len(workers), timeout=timeout_s)


def _place(runtime: Runtime, node: Node) -> ProcessPlace:
    """Where a server or the router listens and writes."""
    # The nodes speak to each other directly, whatever proxy stands before the rest of the world.
    direct = ",".join(sorted({LOOPBACK, *(runtime.address_of(each) for each in runtime.nodes.members)}))
    env = {RUN_ID_VARIABLE: runtime.run_id, "NO_PROXY": direct, "no_proxy": direct}
    return ProcessPlace(runtime.logs, runtime.api_key, runtime.address_of(node), env, temp=node.temp)


@dataclass(frozen=True)
class LaunchingPool:
    """A pool whose processes are starting."""

    workers: list[Worker]
    router: Worker
    starts: list[Call]
    waiter: Waiter
    deadline_s: float

    def ready(self) -> ServerPool:
        """Wait until every server and the router are ready, and introduce them to each other."""
        pids = self._wait(self.starts)
        everyone = [*self.workers, self.router]
        facts = self._wait([Call(worker, worker.handle.facts.remote()) for worker in everyone])
        endpoints = self._wait([Call(worker, worker.handle.endpoint.remote()) for worker in everyone])
        known = [Worker(worker.handle, worker.spec, fact) for worker, fact in zip(everyone, facts, strict=True)]
        servers = [
            Server(worker, endpoint, pid)
            for worker, endpoint, pid in zip(known[:-1], endpoints[:-1], pids[:-1], strict=True)
        ]
        self._wait([Call(known[-1], known[-1].handle.add.remote(server.endpoint)) for server in servers])
        return ServerPool(servers, known[-1], endpoints[-1], self.waiter)

    def _wait(self, calls: list[Call]) -> list[Any]:
        return self.waiter.wait(calls, phase="start", role="rollout", deadline_s=self.deadline_s)
