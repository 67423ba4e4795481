"""The processes that generate: an actor beside every SGLang server, and one beside the router. Not for samples."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from megarl.cluster.nodes import Node
from megarl.cluster.process import LOOPBACK, ProcessFacts, ProcessSpec, configure_process
from megarl.cluster.runtime import Runtime
from megarl.cluster.slots import ServerSlot, slot_on
from megarl.cluster.waits import Call, Waiter, Worker
from megarl.core.errors import MegarlError, WorkerDiedError
from megarl.core.janitor import RUN_ID_VARIABLE, register_segments
from megarl.core.log import get_logger
from megarl.core.platform import PlatformName, get_platform
from megarl.recipe.roles import ServerPart
from megarl.serving.client import ServerClient, ServerEndpoint
from megarl.serving.process import ManagedProcess
from megarl.serving.router import RouterProcess, RouterSpec
from megarl.serving.server import ProcessPlace, ServerProcess, ServerSpec, Span

log = get_logger(__name__)

# Longest select() of a supervisor that waits for its process to end; then it waits again.
WATCH_S = 3600.0
# How much longer the driver waits than a request to a server may take: its error says more.
MARGIN_S = 30.0


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

    async def sleep(self, parts: tuple[ServerPart, ...], deadline_s: float) -> str:
        """Have the server give back the memory of these parts; why it did not, where it did not."""
        return await self._told(lambda client: client.sleep(parts, deadline_s))

    async def wake(self, parts: tuple[ServerPart, ...], serve: bool, deadline_s: float) -> str:
        """Have the server take it again; serve: and requests, too. Why it did not, where it did not."""
        return await self._told(lambda client: client.wake(parts, serve=serve, deadline_s=deadline_s))

    async def _told(self, tell: Callable[[ServerClient], Awaitable[None]]) -> str:
        async with ServerClient(self._server.endpoint) as client:
            try:
                await tell(client)
            except MegarlError as error:
                return str(error)
        return ""


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
    """One member of the pool. others: beside its parts on other nodes, which answer nobody."""

    worker: Worker
    others: tuple[Worker, ...]
    endpoint: ServerEndpoint
    pid: int  # of the SGLang process itself


class ServerPool:
    """The servers that serve, and the router in front. A server that dies or fails an update leaves the pool.

    Parts of their memory may be offloaded while nothing needs them; they serve only while all are awake.
    """

    def __init__(self, servers: list[Server], router: Worker, router_endpoint: ServerEndpoint, waiter: Waiter) -> None:
        self.servers = servers
        self.asleep: frozenset[ServerPart] = frozenset()
        self.router = router
        self.endpoint = router_endpoint
        self._waiter = waiter
        for server in servers:
            for part in (server.worker, *server.others):
                waiter.watches[part.handle.watch.remote()] = partial(self.drop, server.endpoint)
        waiter.watches[router.handle.watch.remote()] = self._router_ended

    @classmethod
    def launch(
        cls,
        runtime: Runtime,
        spec: ServerSpec,
        slots: Sequence[ServerSlot],
        request_timeout_s: float,
        waiter: Waiter,
        deadline_s: float,
    ) -> LaunchingPool:
        """Start all processes side by side, a server a slot; returns at once, so that ranks can start meanwhile."""
        workers = [_start_server(runtime, spec, index, slot) for index, slot in enumerate(slots)]
        process = runtime.process("router")
        place = _place(runtime, runtime.here)
        handle = (
            ray.remote(RouterActor)
            .options(**slot_on(runtime.here).options)
            .remote(process, runtime.here.registry, RouterSpec(request_timeout_s=request_timeout_s), place)
        )
        router = Worker(handle, process, ProcessFacts(0, "?"))
        everyone = [*(part for parts in workers for part in parts), router]
        starts = [Call(worker, worker.handle.start.remote(deadline_s)) for worker in everyone]
        return LaunchingPool(workers, router, starts, waiter, deadline_s)

    def drop(self, endpoint: ServerEndpoint, reason: str) -> None:
        """Take a server out of the pool. Raises WorkerDiedError when it was the last."""
        gone = next((server for server in self.servers if server.endpoint.url == endpoint.url), None)
        if gone is None:
            return
        self.servers.remove(gone)
        if not self.servers:
            circumstances = self._waiter.circumstances()
            raise WorkerDiedError(
                f"{endpoint.name} ({endpoint.url}, pid {gone.pid}) left the pool, and no server remains. {reason}"
                + (f"\n{circumstances}" if circumstances else "")
            )
        log.warning("%s left the pool, %d remain: %s", endpoint.name, len(self.servers), reason.splitlines()[0])
        # Nobody waits for these: the router's own health checks pass over a server that is gone.
        self.router.handle.remove.remote(endpoint.url)
        for part in (gone.worker, *gone.others):
            part.handle.stop.remote()

    def sleep(self, parts: Collection[ServerPart], deadline_s: float) -> None:
        """Have all servers give back the memory of these parts, where they are awake. Raises what `Waiter.wait` raises."""
        new = tuple(sorted(set(parts) - self.asleep))
        self.asleep |= set(new)
        if new:
            self._tell(lambda server: server.sleep.remote(new, deadline_s), "sleep", deadline_s)

    def wake(self, parts: Collection[ServerPart], deadline_s: float) -> None:
        """Have all servers take memory again for these parts, where they are offloaded. Raises what `Waiter.wait` raises."""
        new = tuple(sorted(self.asleep.intersection(parts)))
        self.asleep -= set(new)
        if new:
            serve = not self.asleep
            self._tell(lambda server: server.wake.remote(new, serve, deadline_s), "wake", deadline_s)

    def _tell(self, remote: Callable[[Any], Any], phase: str, deadline_s: float) -> None:
        told = list(self.servers)
        calls = [Call(server.worker, remote(server.worker.handle)) for server in told]
        answers = self._waiter.wait(calls, phase=phase, role="rollout", deadline_s=deadline_s + MARGIN_S)
        for server, trouble in zip(told, answers, strict=True):
            if trouble:
                self.drop(server.endpoint, f"It could not {phase}: {trouble}")

    def _router_ended(self, how: str) -> None:
        raise WorkerDiedError(f"The router ({self.endpoint.url}) ended. {how}")

    def close(self, timeout_s: float = 15.0) -> None:
        """Ask every process to end, side by side; what does not is killed with the run."""
        workers = [*(part for server in self.servers for part in (server.worker, *server.others)), self.router]
        self._waiter.watches.clear()
        ray.wait([worker.handle.stop.remote() for worker in workers], num_returns=len(workers), timeout=timeout_s)


def _start_server(runtime: Runtime, spec: ServerSpec, index: int, slot: ServerSlot) -> tuple[Worker, ...]:
    """A process for each of its parts; the first is the one that answers."""
    spec = replace(spec, shares_devices=slot.shared)
    first = slot.parts[0].node
    meet = f"{first.address}:{runtime.nodes.free_port(first)}" if len(slot.parts) > 1 else ""
    workers = []
    for rank, part in enumerate(slot.parts):
        process = runtime.process(f"server {index}" + (f" part {rank}" if rank else ""), part.node)
        own = replace(spec, span=Span(len(slot.parts), rank, meet)) if meet else spec
        place = _place(runtime, part.node, part.env)
        actor = ray.remote(ServerActor).options(**part.options)
        handle = actor.remote(process, part.node.registry, own, runtime.platform.name, place)
        workers.append(Worker(handle, process, ProcessFacts(0, "?")))
    return tuple(workers)


def _place(runtime: Runtime, node: Node, env: Mapping[str, str] | None = None) -> ProcessPlace:
    """Where a server or the router listens and writes."""
    # The nodes speak to each other directly, whatever proxy stands before the rest of the world.
    direct = ",".join(sorted({LOOPBACK, *(runtime.address_of(each) for each in runtime.nodes.members)}))
    env = {RUN_ID_VARIABLE: runtime.run_id, "NO_PROXY": direct, "no_proxy": direct, **(env or {})}
    return ProcessPlace(runtime.logs, runtime.api_key, runtime.address_of(node), env, temp=node.temp)


@dataclass(frozen=True)
class LaunchingPool:
    """A pool whose processes are starting."""

    servers: list[tuple[Worker, ...]]  # each server's parts, the one that answers first
    router: Worker
    starts: list[Call]
    waiter: Waiter
    deadline_s: float

    def endpoint(self) -> Any:
        """Reference to where the router will answer: known before it does."""
        return self.router.handle.endpoint.remote()

    def ready(self) -> ServerPool:
        """Wait until every server and the router are ready, and introduce them to each other."""
        starting = [call.worker for call in self.starts]
        pids = self._wait(self.starts)
        facts = self._wait([Call(worker, worker.handle.facts.remote()) for worker in starting])
        known = [Worker(worker.handle, worker.spec, fact) for worker, fact in zip(starting, facts, strict=True)]
        endpoints = self._wait([Call(worker, worker.handle.endpoint.remote()) for worker in known])
        servers, first = [], 0
        for parts in self.servers:
            others = tuple(known[first + 1 : first + len(parts)])
            servers.append(Server(known[first], others, endpoints[first], pids[first]))
            first += len(parts)
        router = known[-1]
        self._wait([Call(router, router.handle.add.remote(server.endpoint)) for server in servers])
        return ServerPool(servers, router, endpoints[-1], self.waiter)

    def _wait(self, calls: list[Call]) -> list[Any]:
        return self.waiter.wait(calls, phase="start", role="rollout", deadline_s=self.deadline_s)
