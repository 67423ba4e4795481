"""Starts the actors beside servers and router, the first time and again. Who is started when is the pool's (servers.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import ray

from megarl.cluster.nodes import Node
from megarl.cluster.process import LOOPBACK
from megarl.cluster.runtime import Runtime
from megarl.cluster.server_actors import RouterActor, ServerActor
from megarl.cluster.slots import ServerSlot, slot_on
from megarl.cluster.waits import Worker
from megarl.core.janitor import RUN_ID_VARIABLE
from megarl.serving.router import RouterSpec
from megarl.serving.server import ProcessPlace, ServerSpec, Span


class Source(Protocol):
    """Where a pool's servers come from: `Launched` here, `Found` in external.py."""

    @property
    def kind(self) -> str:
        """What one is called, before its number."""

    @property
    def comes_back(self) -> str:
        """What is done about one that was lost, in words."""

    @property
    def count(self) -> int:
        """How many there are."""

    @property
    def retries(self) -> bool:
        """Whether one that did not come up is worth another try."""

    @property
    def offloaded(self) -> bool:
        """Whether servers have their devices for themselves only while they generate."""

    @property
    def api_key(self) -> str:
        """What opens the router."""

    @property
    def direct(self) -> Sequence[str]:
        """Hosts beside the run's own nodes to which no proxy of the environment leads."""

    def lost(self, index: int) -> bool:
        """Whether a server cannot come back."""

    def server(self, index: int) -> tuple[Worker, ...]:
        """An actor for each part of a server; the first is the one that answers."""


@dataclass(frozen=True)
class Launched:
    """Servers that the run starts, a slot each. answer_s: longest silence of one that is up."""

    runtime: Runtime
    spec: ServerSpec
    slots: Sequence[ServerSlot]
    answer_s: float

    kind = "sglang server"
    comes_back = "is started again"
    retries = True
    direct = ()

    @property
    def count(self) -> int:
        """How many servers there are."""
        return len(self.slots)

    @property
    def offloaded(self) -> bool:
        """Whether servers have their devices for themselves only while they generate."""
        return self.spec.offloaded

    @property
    def api_key(self) -> str:
        """The run's own."""
        return self.runtime.api_key

    def lost(self, index: int) -> bool:
        """Whether Ray has given up a node that the server needs."""
        lost = self.runtime.nodes.lost()
        return any(str(part.node) in lost for part in self.slots[index].parts)

    def server(self, index: int) -> tuple[Worker, ...]:
        """An actor for each part of a server, in its slot; the first is the one that answers."""
        runtime, slot = self.runtime, self.slots[index]
        spec = replace(self.spec, shares_devices=slot.shared)
        first = slot.parts[0].node
        meet = f"{first.address}:{runtime.nodes.free_port(first)}" if len(slot.parts) > 1 else ""
        workers = []
        for rank, part in enumerate(slot.parts):
            process = runtime.process(f"server {index}" + (f" part {rank}" if rank else ""), part.node)
            own = replace(spec, span=Span(len(slot.parts), rank, meet)) if meet else spec
            place = place_on(runtime, part.node, self.api_key, env=part.env)
            actor = ray.remote(ServerActor).options(**part.options)
            registry, platform = part.node.registry, runtime.platform.name
            handle = actor.remote(process, registry, own, platform, place, self.answer_s)
            workers.append(Worker(handle, process))
        return tuple(workers)


@dataclass(frozen=True)
class Starter:
    """Knows the places of a pool's processes. deadline_s: longest start. answer_s: longest silence of a router."""

    runtime: Runtime
    source: Source
    router_spec: RouterSpec
    deadline_s: float
    answer_s: float

    def router(self, port: int | None = None) -> Worker:
        """An actor beside the router, which will listen at this port of the driver's node, or at one that is free."""
        here, process = self.runtime.here, self.runtime.process("router")
        actor = ray.remote(RouterActor).options(**slot_on(here).options)
        spec = replace(self.router_spec, port=port)
        place = place_on(self.runtime, here, self.source.api_key, direct=self.source.direct)
        return Worker(actor.remote(process, here.registry, spec, place, self.answer_s), process)

    def end(self, worker: Worker) -> None:
        """End an actor whose process has ended: what it holds of its slot is free then."""
        ray.kill(worker.handle)


def place_on(
    runtime: Runtime, node: Node, api_key: str, *, env: Mapping[str, str] | None = None, direct: Sequence[str] = ()
) -> ProcessPlace:
    """Where a server or the router listens and writes. direct: hosts beside the run's own that no proxy leads to."""
    # The nodes speak to each other directly, whatever proxy stands before the rest of the world.
    hosts = ",".join(sorted({LOOPBACK, *direct, *(runtime.address_of(each) for each in runtime.nodes.members)}))
    env = {RUN_ID_VARIABLE: runtime.run_id, "NO_PROXY": hosts, "no_proxy": hosts, **(env or {})}
    return ProcessPlace(runtime.logs, api_key, runtime.address_of(node), env, temp=node.temp)
