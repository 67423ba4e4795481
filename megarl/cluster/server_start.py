"""Starts the actors beside servers and router, the first time and again. Who is started when is the pool's (servers.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import ray

from megarl.cluster.nodes import Node
from megarl.cluster.process import LOOPBACK, ProcessFacts
from megarl.cluster.runtime import Runtime
from megarl.cluster.server_actors import RouterActor, ServerActor
from megarl.cluster.slots import ServerSlot, slot_on
from megarl.cluster.waits import Worker
from megarl.core.janitor import RUN_ID_VARIABLE
from megarl.serving.router import RouterSpec
from megarl.serving.server import ProcessPlace, ServerSpec, Span

UNKNOWN = ProcessFacts(0, "?")


@dataclass(frozen=True)
class Starter:
    """Knows the places of a pool's processes. deadline_s: longest start. answer_s: longest silence of one that is up."""

    runtime: Runtime
    spec: ServerSpec
    slots: Sequence[ServerSlot]
    router_spec: RouterSpec
    deadline_s: float
    answer_s: float

    @property
    def offloaded(self) -> bool:
        """Whether servers have their devices for themselves only while they generate."""
        return self.spec.offloaded

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
            place = self._place(part.node, part.env)
            actor = ray.remote(ServerActor).options(**part.options)
            registry, platform = part.node.registry, runtime.platform.name
            handle = actor.remote(process, registry, own, platform, place, self.answer_s)
            workers.append(Worker(handle, process, UNKNOWN))
        return tuple(workers)

    def router(self, port: int | None = None) -> Worker:
        """An actor beside the router, which will listen at this port of the driver's node, or at one that is free."""
        here, process = self.runtime.here, self.runtime.process("router")
        actor = ray.remote(RouterActor).options(**slot_on(here).options)
        spec = replace(self.router_spec, port=port)
        return Worker(actor.remote(process, here.registry, spec, self._place(here), self.answer_s), process, UNKNOWN)

    def end(self, worker: Worker) -> None:
        """End an actor whose process has ended: what it holds of its slot is free then."""
        ray.kill(worker.handle)

    def _place(self, node: Node, env: Mapping[str, str] | None = None) -> ProcessPlace:
        """Where a server or the router listens and writes."""
        runtime = self.runtime
        # The nodes speak to each other directly, whatever proxy stands before the rest of the world.
        direct = ",".join(sorted({LOOPBACK, *(runtime.address_of(each) for each in runtime.nodes.members)}))
        env = {RUN_ID_VARIABLE: runtime.run_id, "NO_PROXY": direct, "no_proxy": direct, **(env or {})}
        return ProcessPlace(runtime.logs, runtime.api_key, runtime.address_of(node), env, temp=node.temp)
