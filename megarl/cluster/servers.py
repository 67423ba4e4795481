"""The servers that generate and the router in front of them, as the driver knows them. Not for samples.

One that dies or stands still is started again in its place, gets the next weights with the others, and serves once they
were verified. Nothing here runs by itself: it goes on while the driver waits for something (waits.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from megarl.cluster.healing import ALIVE, Member, Restarts, Server, State
from megarl.cluster.server_actors import Started
from megarl.cluster.server_start import Starter
from megarl.cluster.services import RayDiedError
from megarl.cluster.waits import Call, Waiter, Worker
from megarl.core.errors import GivenUpError, MegarlError, WorkerDiedError
from megarl.core.log import get_logger
from megarl.recipe.roles import ServerPart
from megarl.serving.client import ServerEndpoint
from megarl.sync.fetch import Fetched, Order

log = get_logger(__name__)

# How much longer the driver waits than a request to a server may take: its error says more.
MARGIN_S = 30.0
ADD_S = 90.0  # longest wait for the router to take a server in; its own limit is shorter


class ServerPool:
    """The servers of a run, and the router.

    Parts of their memory may be offloaded while nothing needs them; they serve only while all are awake. refresh: sends
    the current weights again, to whoever is ready; None where weights never change, and a server that is up may serve.
    """

    def __init__(
        self,
        starter: Starter,
        members: Sequence[Member],
        router: Worker,
        endpoint: ServerEndpoint,
        waiter: Waiter,
        restarts: Restarts,
    ) -> None:
        self.members = tuple(members)
        self.endpoint = endpoint  # the router's, also after it was started again
        self.router = router
        self.asleep: frozenset[ServerPart] = frozenset()
        self.restarts = restarts
        self.refresh: Callable[[], None] | None = None
        self.starter = starter
        self._source = starter.source
        self.waiter = waiter
        self.router_up = True
        self._adding = 0  # servers that the router is being told of
        self._unrouted = False  # whether it was started again while the pool slept, and knows none
        self._traffic = False  # whether samples are asked for
        self._urgent = False  # whether a server has to start now, whoever needs the devices
        self._refreshing = False
        for member in self.members:
            self._watch(member)
        waiter.watches[router.handle.watch.remote()] = self._router_ended

    @property
    def servers(self) -> list[Server]:
        """Those that serve."""
        return self._in(State.SERVING)

    def receivers(self) -> list[Server]:
        """Those that are to get new weights: all that are up."""
        return self._in(*ALIVE)

    def holding(self) -> list[Server]:
        """Those that have the last weights that were sent."""
        return self._in(State.CURRENT, State.SERVING)

    def received(self, endpoints: Collection[ServerEndpoint]) -> None:
        """New weights have arrived at these: not at one that has come back at the address of such a one meanwhile."""
        for member in self.members:
            if member.state is State.READY and member.server is not None and member.server.endpoint in endpoints:
                member.state = State.CURRENT

    def admit(self, weight_version: int) -> None:
        """Let those serve whose weights were verified. Only while the pool is awake: the router asks them first."""
        came = [member for member in self.members if member.state is State.CURRENT]
        servers = [member.server for member in came if member.server is not None]
        troubles, router = [""] * len(servers), self.router
        if self.router_up:
            add = self.router.handle.add
            troubles = self._ask([Call(self.router, add.remote(server.endpoint)) for server in servers], "sync", ADD_S)
        for member, server, trouble in zip(came, servers, troubles, strict=True):
            if member.server is not server:
                continue  # it was lost meanwhile
            if trouble and self.router_up and self.router is router:
                self.drop(server.endpoint, f"The router did not take it in: {trouble}")
            else:
                self._serves(member, f"weights of version {weight_version} verified")

    def drop(self, endpoint: ServerEndpoint, reason: str) -> None:
        """Take a server out of the pool. Raises WorkerDiedError where none remains or comes back, or too many died."""
        for member in self.members:
            if member.server is not None and member.server.endpoint == endpoint:
                self._lose(member, reason)

    @contextmanager
    def traffic(self) -> Iterator[None]:
        """Within, samples are asked for. Whenever none of the servers is left, those that are ready get the weights again."""
        self._traffic = True
        try:
            self._start_gone()
            if not self.servers:
                self.await_ready()
                self._refresh()
            yield
        finally:
            self._traffic = False

    def await_ready(self) -> None:
        """Wait until a server is up. Raises DeadlineError, and WorkerDiedError where too many died."""
        if self.receivers():
            return
        self.asleep, self._urgent = frozenset(), True  # a server that starts is awake
        try:
            self._start_gone()
            self._until(lambda: bool(self.receivers()), "The start of a server in the place of one that died")
        finally:
            self._urgent = False

    def sleep(self, parts: Collection[ServerPart], deadline_s: float) -> None:
        """Have all servers give back the memory of these parts, where they are awake. Raises what `Waiter.wait` raises."""
        new = tuple(sorted(set(parts) - self.asleep))
        if new:
            # One that starts takes all of its memory: it has to be there to give it back.
            self._until(
                lambda: not self._starting() and not self._adding, "The start of a server before the others sleep"
            )
            self.asleep |= set(new)
            self._tell(lambda server: server.sleep.remote(new, deadline_s), "sleep", deadline_s)

    def wake(self, parts: Collection[ServerPart], deadline_s: float) -> None:
        """Have all servers take memory again for these parts, where they are offloaded. Raises what `Waiter.wait` raises."""
        new = tuple(sorted(self.asleep.intersection(parts)))
        self.asleep -= set(new)
        if new:
            serve = not self.asleep
            self._tell(lambda server: server.wake.remote(new, serve, deadline_s), "wake", deadline_s)
        if self._unrouted:
            self._route_all()

    def pause(self, *, keep_kv: bool, deadline_s: float) -> None:
        """Have all servers stop generating until `resume`. keep_kv: they do not compute anew what they have."""
        self._tell(lambda server: server.pause.remote(keep_kv, deadline_s), "pause", deadline_s)

    def resume(self, deadline_s: float) -> None:
        """Have all servers go on."""
        self._tell(lambda server: server.resume.remote(deadline_s), "resume", deadline_s)

    def fetch(self, order: Order) -> dict[ServerEndpoint, Fetched]:
        """Have all that are up load a weight version from the disk, and how it went with each."""
        up = self.receivers()
        blind = self._blind(up, order)
        told = [server for server in up if server.endpoint not in blind]
        calls = [Call(each.worker, each.worker.handle.fetch.remote(order)) for each in told]
        answers = self._answers(calls, "sync", order.timeout_s)
        found = (each if isinstance(each, Fetched) else Fetched(str(each)) for each in answers)
        return blind | dict(zip((server.endpoint for server in told), found, strict=True))

    def _blind(self, servers: Sequence[Server], order: Order) -> dict[ServerEndpoint, Fetched]:
        """Those that have a part on a node where the version cannot be read, and why.

        SGLang answers for its first rank alone: one on another node that finds nothing keeps what it has, and nobody is told.
        """
        parts = [(server.endpoint, other) for server in servers for other in server.others]
        calls = [Call(other, other.handle.sees.remote(order)) for _, other in parts]
        troubles = self._ask(calls, "sync", order.timeout_s)
        return {end: Fetched(trouble) for (end, _), trouble in zip(parts, troubles, strict=True) if trouble}

    def failed_loads(self) -> str:
        """What logs of servers say of weights that were not loaded: SGLang answers for its first rank alone."""
        calls = [Call(part, part.handle.failed_loads.remote()) for member in self.members for part in member.parts]
        with contextlib.suppress(MegarlError):  # whoever asks has an error of more weight
            return "\n".join(each for each in self._answers(calls, "sync", 0.0) if isinstance(each, str) and each)
        return ""

    def close(self, timeout_s: float = 15.0) -> None:
        """Ask every process to end, side by side, those that start too; what does not is killed with the run."""
        self.waiter.watches.clear()
        self.waiter.followed.clear()  # nothing is started again
        workers = [*(part for member in self.members for part in member.parts), self.router]
        ray.wait([worker.handle.stop.remote() for worker in workers], num_returns=len(workers), timeout=timeout_s)

    def _in(self, *states: State) -> list[Server]:
        return [member.server for member in self.members if member.server is not None and member.state in states]

    def _starting(self) -> bool:
        return any(member.state is State.STARTING for member in self.members)

    def _until(self, done: Callable[[], bool], what: str) -> None:
        self.waiter.until(done, what, self.starter.deadline_s + MARGIN_S)

    def _tell(self, remote: Callable[[Any], Any], phase: str, deadline_s: float) -> None:
        told = self.receivers()
        troubles = self._ask([Call(each.worker, remote(each.worker.handle)) for each in told], phase, deadline_s)
        for server, trouble in zip(told, troubles, strict=True):
            if trouble:
                self.drop(server.endpoint, f"It could not {phase}: {trouble}")

    def _ask(self, calls: Sequence[Call], phase: str, deadline_s: float) -> list[str]:
        """What went wrong with each, or nothing: an actor that died says no more than that."""
        return [str(each) for each in self._answers(calls, phase, deadline_s)]

    def _answers(self, calls: Sequence[Call], phase: str, deadline_s: float) -> list[Any]:
        """What each says; of an actor that died the error."""
        found: list[Any] = []
        for call in calls:
            try:
                found += self.waiter.wait([call], phase=phase, role="rollout", deadline_s=deadline_s + MARGIN_S)
            except (RayDiedError, GivenUpError):
                raise
            except WorkerDiedError as error:
                found.append(error)
        return found

    def _watch(self, member: Member) -> None:
        server = member.server
        assert server is not None, member

        def gone(how: str) -> None:
            if member.server is server:  # not one that came back, perhaps at the same address
                self._lose(member, how)

        for part in member.parts:
            self.waiter.watches[part.handle.watch.remote()] = gone

    def _lose(self, member: Member, reason: str, *, for_good: bool = False) -> None:
        """A server died, failed or stands still: nobody asks it any more, and what is left of it is ended."""
        server, was = member.server, member.state
        member.server, member.state = None, State.SUSPECT
        if member.left is None:
            member.left = time.monotonic()
        lost = for_good or self._source.lost(member.index)
        member.for_good = lost or not self.restarts.count(member.name, reason)
        who = member.name if server is None else str(server)
        if all(each.for_good for each in self.members):
            circumstances = self.waiter.circumstances()
            raise GivenUpError(
                f"{who} left the pool, and no server remains. {reason}"
                + (f"\n{circumstances}" if circumstances else "")
            )
        log.warning(
            "%s left the pool, %d remain%s: %s",
            member.name,
            len(self.servers),
            "" if member.for_good else f", and {self._source.comes_back} (restart {self.restarts.total})",
            reason.splitlines()[0],
        )
        if server is not None and was is State.SERVING and self.router_up:
            # Nobody waits for it: the router's own health checks pass over a server that is gone.
            self.router.handle.remove.remote(server.endpoint.url)
        stops = [Call(part, part.handle.stop.remote()) for part in member.parts]
        self.waiter.follow(stops, partial(self._ended, member), patient=True)
        self._refresh_where_nobody_serves()

    def _ended(self, member: Member, results: list[Any], failure: str) -> None:
        """Nothing of a server's processes is left. A failure is of its actor, which had died before."""
        for part in member.parts:
            self.starter.end(part)
        member.parts, member.state = (), State.GONE
        self._start_gone()

    def _start_gone(self) -> None:
        """Start those again that are gone, where nothing else needs their devices now."""
        if self._source.offloaded and not (self._traffic or self._urgent):
            return
        for member in self.members:
            if member.state is State.GONE and not member.for_good:
                member.parts, member.state = self._source.server(member.index), State.STARTING
                starts = [Call(part, part.handle.start.remote(self.starter.deadline_s)) for part in member.parts]
                self.waiter.follow(starts, partial(self._started, member))

    def _started(self, member: Member, results: list[Started], failure: str) -> None:
        if failure:
            self._lose(member, f"It did not come up: {failure}", for_good=not self._source.retries)
            return
        up(member, results)
        self._watch(member)
        if self.refresh is None:
            self._route(member)
        self._refresh_where_nobody_serves()

    def _refresh_where_nobody_serves(self) -> None:
        if self._traffic and not self.servers and self.receivers():
            self._refresh()

    def _refresh(self) -> None:
        """Bring those that are ready to serving, while samples are asked for and nobody else answers."""
        if self.refresh is None:
            self._until(lambda: bool(self.servers), "A server in the place of one that died")
        elif not self._refreshing:
            self._refreshing = True
            try:
                self.refresh()
            finally:
                self._refreshing = False

    def _serves(self, member: Member, why: str) -> None:
        member.state = State.SERVING
        if member.left is not None:
            log.warning("%s is back after %.0f s, %s", member.name, time.monotonic() - member.left, why)
            member.left = None

    def _route(self, member: Member) -> None:
        """Have the router send requests to a server that may serve, without waiting for it."""
        server = member.server
        assert server is not None, member

        def taken(answers: list[str], failure: str) -> None:
            self._adding -= 1
            if member.server is not server or failure:
                return  # lost meanwhile; where the router's actor failed, its end is watched
            if answers[0]:
                self._lose(member, f"The router did not take it in: {answers[0]}")
            else:
                self._serves(member, "with its weights as they are")

        self._adding += 1
        self.waiter.follow([Call(self.router, self.router.handle.add.remote(server.endpoint))], taken)

    def _route_all(self) -> None:
        """Tell a router that knows nobody. It asks servers before it takes them in, and those that sleep do not answer."""
        self._unrouted = bool(self.asleep)
        for member in () if self._unrouted else self.members:
            if member.state is State.SERVING or (member.state is State.READY and self.refresh is None):
                self._route(member)

    def _router_ended(self, how: str) -> None:
        self.router_up = False
        if not self.restarts.count("the router", how):
            raise GivenUpError(f"The router ({self.endpoint.url}) ended. {how}")
        log.warning("the router ended, and is started again at the same address: %s", how.splitlines()[0])
        stop = Call(self.router, self.router.handle.stop.remote())
        self.waiter.follow([stop], self._start_router, patient=True)

    def _start_router(self, results: list[Any], failure: str) -> None:
        self.starter.end(self.router)
        self.router = self.starter.router(int(self.endpoint.url.rpartition(":")[2]))
        start = self.router.handle.start.remote(self.starter.deadline_s)
        self.waiter.follow([Call(self.router, start)], self._router_started)

    def _router_started(self, results: list[Started], failure: str) -> None:
        if failure:
            self._router_ended(f"It did not start: {failure}")
            return
        self.router_up = True
        self.router = replace(self.router, facts=results[0].facts)
        self.waiter.watches[self.router.handle.watch.remote()] = self._router_ended
        log.warning("the router is back at %s", self.endpoint.url)
        self._route_all()


def up(member: Member, parts: Sequence[Started]) -> None:
    """Note where a member's server answers."""
    member.parts = tuple(replace(part, facts=started.facts) for part, started in zip(member.parts, parts, strict=True))
    first, *others = member.parts
    member.server = Server(first, tuple(others), parts[0].endpoint, parts[0].pid)
    member.state = State.READY
