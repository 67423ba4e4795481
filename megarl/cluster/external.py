"""Servers that somebody else started, as places of a pool: looked for where others are started, let go of where others are
ended. The processes beside them are the run's own. Which server a run can use is serving/external's to say.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import ray

from megarl.cluster.process import ProcessSpec, configure_process
from megarl.cluster.runtime import Runtime
from megarl.cluster.server_actors import HEALTH_S, ServerCalls, Started
from megarl.cluster.slots import slot_on
from megarl.cluster.waits import Worker
from megarl.core.errors import DeadlineError, MegarlError
from megarl.core.log import get_logger
from megarl.serving.answers import split_label
from megarl.serving.client import ServerClient, ServerEndpoint
from megarl.serving.external import ExternalPool, ModelFacts, check_run, suited
from megarl.serving.vigil import LOOK_S, Vigil

log = get_logger(__name__)

CONNECT_EVERY_S = 1.0  # between two looks at whether anybody listens there
GONE_S = 3.0  # nobody listens for so long: it has ended, and one that is started anew takes longer to be back
RELEASE_S = 10.0  # longest wait for a server to take back what a run has told it
NO_PID = 0  # it may be another machine's


class ExternalActor(ServerCalls):
    """Beside one server that somebody else started: finds it, tells it what the run wants, and says when it is gone."""

    def __init__(self, spec: ProcessSpec, server: ServerEndpoint, expected: ModelFacts, answer_s: float) -> None:
        self._facts = configure_process(spec)
        super().__init__(server)
        self._expected = expected
        self._answer_s = answer_s
        self._taken = False

    async def start(self, deadline_s: float) -> Started:
        """Wait until the server answers, and serves what it should. Raises DeadlineError with what was wrong last.

        What an earlier run may have left is undone: a pause, and an update that was begun.
        """
        end = time.monotonic() + deadline_s
        while True:
            try:
                self._endpoint = replace(await suited(self._endpoint, self._expected), since=time.time())
                self._taken = True
                await self._release()
                await self._mark(self._endpoint)
                return Started(NO_PID, self._facts, self._endpoint)
            except MegarlError as error:
                if time.monotonic() > end:
                    raise DeadlineError(
                        f"It was looked for in vain for {deadline_s:g} s (deadlines.start_s). {error}"
                    ) from error
            await asyncio.sleep(LOOK_S)

    async def watch(self) -> str:
        """Returns when nobody listens there any more, or the server is silent for too long: which, in words."""
        vigil, asked = Vigil(self._answer_s), time.monotonic()
        heard = asked
        while True:
            await asyncio.sleep(CONNECT_EVERY_S)
            nobody = await self._nobody_listens()
            if not nobody:
                heard = time.monotonic()
            elif time.monotonic() - heard >= GONE_S:
                return f"Nobody listens at {self._endpoint.url} any more: {nobody}"
            if time.monotonic() - asked >= vigil.ask_every_s:
                async with ServerClient(self._endpoint) as client:
                    answers = None if self._paused else await client.health(HEALTH_S)
                # One that was paused meanwhile lets even this question wait.
                trouble, asked = vigil.heard(None if self._paused else answers), time.monotonic()
                if trouble:
                    return trouble

    async def stop(self) -> None:
        """Let go of the server, which goes on without this run; of one that was never its own there is nothing to let go of."""
        if not self._taken:
            return
        try:
            await self._release()
            await self._mark(replace(self._endpoint, run=""))
        except MegarlError as error:
            log.warning("%s (%s) was not let go of in order: %s", self._endpoint.name, self._endpoint.url, error)

    async def _release(self) -> None:
        async with ServerClient(self._endpoint) as client:
            await client.close_weight_update(RELEASE_S)
            await client.resume(RELEASE_S)
        self._paused = False

    async def _mark(self, as_of: ServerEndpoint) -> None:
        """Have the server say, beside its version, which run sends it weights: none, where the endpoint has none.

        Raises UnfitServerError where another run does.
        """
        if not self._endpoint.run:
            return
        async with ServerClient(self._endpoint) as client:
            await check_run(client, RELEASE_S)
            version, _ = split_label(await client.weight_version(RELEASE_S))
        async with ServerClient(as_of) as client:
            await client.set_weight_version(version, RELEASE_S)

    async def _nobody_listens(self) -> str:
        """Why no connection can be made; empty where one can, or where it is not known."""
        parts = urlsplit(self._endpoint.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            async with asyncio.timeout(HEALTH_S):
                _, writer = await asyncio.open_connection(parts.hostname, port)
        except TimeoutError:
            return ""  # a link that is slow or down; the silence of a server is another question
        except OSError as error:
            return str(error)
        writer.close()
        return ""


@dataclass(frozen=True)
class Found:
    """The places of servers that somebody else started: a `Source` of a pool. answer_s: longest silence of one."""

    runtime: Runtime
    pool: ExternalPool
    answer_s: float

    kind = "external server"
    comes_back = "is looked for again"
    retries = False  # it was looked for as long as the run may wait
    offloaded = False

    @property
    def count(self) -> int:
        """How many servers there are."""
        return len(self.pool.endpoints)

    @property
    def api_key(self) -> str:
        """The router's. What asks it is passed on with the key that it was asked with, and has to open the servers as well."""
        return self.pool.endpoints[0].api_key or self.runtime.api_key

    @property
    def direct(self) -> tuple[str, ...]:
        """Hosts to which no proxy of the environment leads."""
        return self.pool.hosts

    def lost(self, index: int) -> bool:
        """Whether it cannot come back: nothing that the run knows of says so."""
        return False

    def server(self, index: int) -> tuple[Worker, ...]:
        """An actor beside the server, on the driver's node."""
        runtime = self.runtime
        process = runtime.process(f"{self.kind} {index}")
        actor = ray.remote(ExternalActor).options(**slot_on(runtime.here).options)
        handle = actor.remote(process, self.pool.endpoints[index], self.pool.expected, self.answer_s)
        return (Worker(handle, process),)
