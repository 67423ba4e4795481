"""The processes beside SGLang's: an actor starts a server or the router, and says when it ends or stands still."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.cluster.process import ProcessFacts, ProcessSpec, configure_process
from megarl.core.errors import MegarlError
from megarl.core.janitor import SHARED_MEMORY, register_segments
from megarl.core.platform import PlatformName, get_platform
from megarl.core.process_state import Stopped, stopped
from megarl.serving.client import ServerClient, ServerEndpoint
from megarl.serving.process import ManagedProcess, process_tree
from megarl.serving.router import RouterProcess, RouterSpec
from megarl.serving.server import ProcessPlace, ServerProcess, ServerSpec
from megarl.serving.vigil import LOOK_S, Vigil
from megarl.sync.fetch import Fetched, Fetcher, Order

if TYPE_CHECKING:
    from megarl.recipe.roles import ServerPart  # recipes take a moment to load, and these processes have none

REGISTER_S = 0.2  # between two looks at the shared memory of a process that starts
ENDING_S = 1.0  # a router that has broken off is given to end
HEALTH_S = 20.0  # longest wait for one such answer


@dataclass(frozen=True)
class Started:
    """A server or router that is ready. pid: its own, 0 where nobody here knows it. endpoint: where it answers.

    facts: of the actor beside it.
    """

    pid: int
    facts: ProcessFacts
    endpoint: ServerEndpoint


class ServerCalls:
    """What any server is told through the process beside it, whoever started the server."""

    def __init__(self, endpoint: ServerEndpoint) -> None:
        self._endpoint = endpoint
        self._paused = False
        self._fetcher = Fetcher(endpoint)

    async def pause(self, keep_kv: bool, deadline_s: float) -> str:
        """Have the server stop generating; its requests go on after `resume`. Why it did not, where it did not."""
        self._paused = True
        return await told(self._endpoint, lambda client: client.pause("in_place" if keep_kv else "retract", deadline_s))

    async def resume(self, deadline_s: float) -> str:
        """Have the server go on after `pause`. Why it did not, where it did not."""
        trouble = await told(self._endpoint, lambda client: client.resume(deadline_s))
        self._paused = False
        return trouble

    async def fetch(self, order: Order) -> Fetched:
        """Have the server load a weight version from a folder that its node sees."""
        return await self._fetcher.fetch(order)

    async def failed_loads(self) -> str:
        """What a log that is known here says of weights that a rank of the server could not load."""
        return ""

    async def sees(self, order: Order) -> str:
        """Whether this node can read a weight version, for a part of a server that answers elsewhere: why not, or nothing."""
        return await self._fetcher.sees(order)


class _Supervisor:
    """Starts one subprocess and watches it. Subprocesses die with the thread that starts them: the event loop's."""

    def __init__(
        self, spec: ProcessSpec, registry: Path, process: ManagedProcess, endpoint: ServerEndpoint, answer_s: float
    ) -> None:
        self._facts = configure_process(spec)
        self._registry = registry
        self._process = process
        self._endpoint = endpoint
        self._answer_s = answer_s
        self._watcher: Vigil | None = None

    async def endpoint(self) -> ServerEndpoint:
        """Where the subprocess answers, or will."""
        return self._endpoint

    async def start(self, deadline_s: float) -> Started:
        """Start the subprocess and wait until it is ready."""
        known = set(self._process.shm_names())
        register_segments(self._registry, sorted(known))
        self._process.start()
        ready = asyncio.create_task(asyncio.to_thread(self._process.wait_ready, deadline_s))
        there: set[str] = set()
        while not ready.done():
            # Also of one that is killed as it starts: its segments are found by its processes alone.
            await asyncio.wait([ready], timeout=REGISTER_S)
            before, there = there, set(os.listdir(SHARED_MEMORY))
            if there <= before and not ready.done():
                continue  # nobody has made any: to look through all processes costs ten times as much
            names = set(self._process.shm_names())
            register_segments(self._registry, sorted(names - known))
            known |= names
        await ready
        return Started(self._process.pid, self._facts, self._endpoint)

    async def watch(self) -> str:
        """Returns when the subprocess has ended, or stands still: how, with the end of its log.

        Or when somebody else watches from now on: a run that goes on, in the place of a life that is over.
        """
        vigil, asked = Vigil(self._answer_s), time.monotonic()
        self._watcher = vigil
        while not await asyncio.to_thread(self._process.wait_exit, LOOK_S):
            if self._watcher is not vigil:
                return "somebody else watches"
            trouble = vigil.saw(await asyncio.to_thread(self._stopped))
            if not trouble and time.monotonic() - asked >= vigil.ask_every_s:
                answers = await asyncio.to_thread(self._process.works, HEALTH_S) if self._expected() else None
                trouble, asked = vigil.heard(answers if self._expected() else None), time.monotonic()
            if trouble:
                return f"{trouble} {self._process.epitaph()}"
        return self._process.epitaph()

    async def stop(self) -> None:
        """End the subprocess and what it holds."""
        await asyncio.to_thread(self._process.stop)

    def _expected(self) -> bool:
        """Whether it is to answer now."""
        return True

    def _stopped(self) -> list[Stopped]:
        return [each for each in map(stopped, process_tree(self._process.pid)) if each is not None]


class ServerActor(_Supervisor, ServerCalls):
    """Beside one SGLang server."""

    def __init__(
        self,
        spec: ProcessSpec,
        registry: Path,
        server: ServerSpec,
        platform: PlatformName,
        place: ProcessPlace,
        answer_s: float,
    ) -> None:
        process = self._server = ServerProcess(f"sglang {spec.name}", server, get_platform(platform), place)
        self._asleep: set[ServerPart] = set()
        ServerCalls.__init__(self, process.endpoint)
        _Supervisor.__init__(self, spec, registry, process, process.endpoint, answer_s)

    async def sleep(self, parts: tuple[ServerPart, ...], deadline_s: float) -> str:
        """Have the server give back the memory of these parts; why it did not, where it did not."""
        self._asleep.update(parts)
        if "weights" in parts:
            self._fetcher.forget()
        return await told(self._endpoint, lambda client: client.sleep(parts, deadline_s))

    async def wake(self, parts: tuple[ServerPart, ...], serve: bool, deadline_s: float) -> str:
        """Have the server take it again; serve: and requests, too. Why it did not, where it did not."""
        trouble = await told(self._endpoint, lambda client: client.wake(parts, serve=serve, deadline_s=deadline_s))
        self._asleep.difference_update(parts)
        return trouble

    async def release(self, deadline_s: float) -> str:
        """Have the server end all that it was asked, awake, without a weight update; why it did not, or nothing.

        For another life of the run: what is left of its weights is not to be relied on.
        """
        asleep, self._paused = tuple(sorted(self._asleep)), False
        await asyncio.to_thread(self._fetcher.leave)

        async def free(client: ServerClient) -> None:
            await client.close_weight_update(deadline_s)
            await client.wake(asleep, serve=True, deadline_s=deadline_s) if asleep else await client.resume(deadline_s)
            await client.empty(deadline_s)

        trouble = await told(self._endpoint, free)
        self._asleep.clear()
        return trouble

    async def failed_loads(self) -> str:
        """See ServerCalls."""
        return await asyncio.to_thread(self._server.failed_loads)

    def _expected(self) -> bool:
        return not self._asleep and not self._paused  # one that sleeps lets even the question for its health wait


class RouterActor(_Supervisor):
    """Beside the router."""

    def __init__(
        self, spec: ProcessSpec, registry: Path, router: RouterSpec, place: ProcessPlace, answer_s: float
    ) -> None:
        self._router = RouterProcess(router, place, name=f"sglang_{spec.name}")
        super().__init__(spec, registry, self._router, self._router.endpoint, answer_s)

    async def add(self, server: ServerEndpoint) -> str:
        """Send requests to this server too. Why that was not possible; nothing where the router itself is gone."""
        try:
            await asyncio.to_thread(self._router.add, server)
        except MegarlError as error:
            # One that is killed closes its connections first, and has ended a moment later.
            return "" if await asyncio.to_thread(self._router.wait_exit, ENDING_S) else str(error)
        return ""

    async def remove(self, url: str) -> None:
        """Send nothing more to this server."""
        await asyncio.to_thread(self._router.remove, url)


async def told(endpoint: ServerEndpoint, tell: Callable[[ServerClient], Awaitable[None]]) -> str:
    """Tell a server something; why it did not do so, or nothing."""
    async with ServerClient(endpoint) as client:
        try:
            await tell(client)
        except MegarlError as error:
            return str(error)
    return ""
