"""The coordinator's side of its collectors: who lives, what each is told, what each has to do. Not for what is decided."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, Protocol

from megarl.core.errors import MegarlError
from megarl.core.log import get_logger
from megarl.rollout.tasks import EvalFacts, GroupTask, Load, News
from megarl.serving.client import ServerEndpoint

log = get_logger(__name__)


class CollectorLink(Protocol):
    """What is asked of a collector, wherever it is: see megarl.rollout.collector.Collector. Raises LinkLostError."""

    async def begin(self, tasks: Sequence[GroupTask]) -> None: ...  # noqa: D102
    async def news(self) -> News: ...  # noqa: D102
    async def load(self) -> Load: ...  # noqa: D102
    async def cancel(self, groups: Collection[int]) -> None: ...  # noqa: D102
    async def forget(self, groups: Collection[int]) -> None: ...  # noqa: D102
    async def hold(self) -> None: ...  # noqa: D102
    async def idle(self) -> None: ...  # noqa: D102
    async def release(self) -> None: ...  # noqa: D102
    async def cut(self, servers: Sequence[ServerEndpoint]) -> None: ...  # noqa: D102
    async def write(self, step: int, groups: Collection[int]) -> None: ...  # noqa: D102
    async def evaluate(self, rows: Sequence[int], step: int) -> EvalFacts: ...  # noqa: D102


class LinkLostError(MegarlError):
    """A collector answers no more."""


class Links:
    """Collectors by number. What has died is told nothing until it is replaced; its tasks wait for that.

    told: called with (owner, news) as they come. lost: called with the owner when one is found dead. fault: called with
    what else a listener met.
    """

    def __init__(
        self,
        links: Sequence[CollectorLink],
        told: Callable[[int, News], Coroutine[Any, Any, None]],
        lost: Callable[[int], Awaitable[None]],
        fault: Callable[[BaseException], None],
    ) -> None:
        self._links: list[CollectorLink | None] = list(links)
        self._told, self._lost, self._fault = told, lost, fault
        self._posted: list[list[GroupTask]] = [[] for _ in links]
        self._looked_up: set[int] = set()
        self._held = False
        self._came = asyncio.Event()
        self._working: set[asyncio.Task[None]] = set()
        self._listeners = {owner: asyncio.create_task(self._listen(owner, link)) for owner, link in enumerate(links)}

    def __len__(self) -> int:
        return len(self._links)

    def living(self) -> list[int]:
        """Numbers of those that answer."""
        return [owner for owner, link in enumerate(self._links) if link is not None]

    @property
    def looks_up(self) -> bool:
        """Whether it is still open of a group what the journal has of it, and so how old that is."""
        return bool(self._looked_up)

    def post(self, owner: int, task: GroupTask) -> None:
        """A group for `flush` to have made; where the collector has died, by the one that replaces it.

        At once, so that it goes with the ledger's event: one that dies before it is told has lost the group like any other.
        """
        self._posted[owner].append(task)
        if task.recorded:
            self._looked_up.add(task.group)

    async def flush(self) -> None:
        """Tell all that live what was posted for them."""
        await asyncio.gather(*(self._send(owner) for owner in self.living() if self._posted[owner]))

    async def tell(self, owner: int, what: Callable[[CollectorLink], Awaitable[Any]]) -> bool:
        """Tell one collector something. Whether it has taken it; one that has died does not."""
        link = self._links[owner]
        if link is None:
            return False
        try:
            await what(link)
        except LinkLostError as error:
            await self._died(owner, link, error)
            return False
        return True

    async def cancel(self, owner: int, groups: Collection[int]) -> None:
        """Have a collector stop making groups and forget what there is of them."""
        gone = set(groups)
        self._looked_up -= gone
        self._posted[owner] = [task for task in self._posted[owner] if task.group not in gone]
        await self.tell(owner, lambda link: link.cancel(groups))

    async def forget(self, owner: int, groups: Collection[int]) -> None:
        """Tell a collector of groups that have been trained on."""
        await self.tell(owner, lambda link: link.forget(groups))

    async def everyone(self, what: Callable[[CollectorLink], Awaitable[Any]]) -> None:
        """Tell all that live."""
        await asyncio.gather(*(self.tell(owner, what) for owner in self.living()))

    async def hold(self) -> None:
        """No collector begins a request until `release`; nor does one that comes in the place of another."""
        self._held = True
        await self.everyone(lambda link: link.hold())

    async def cut(self, servers: Sequence[ServerEndpoint]) -> None:
        """End the requests that run at these servers; none begins until `release`."""
        self._held = True
        await self.everyone(lambda link: link.cut(servers))

    async def release(self) -> None:
        """Requests begin again."""
        self._held = False
        await self.everyone(lambda link: link.release())

    async def loads(self) -> dict[int, Load]:
        """What each living collector's requests do at the servers, as of now."""
        found: dict[int, Load] = {}

        async def ask(owner: int) -> None:
            async def one(link: CollectorLink) -> None:
                found[owner] = await link.load()

            await self.tell(owner, one)

        await asyncio.gather(*(ask(owner) for owner in self.living()))
        return found

    async def evaluate(self, rows: Sequence[int], step: int) -> list[EvalFacts]:
        """Held-out rows answered, each living collector its share; what one that dies leaves is done by the others.

        Where none lives, those that come in their place do it.
        """
        found: list[EvalFacts] = []
        left = list(rows)
        while left:
            while not (living := self.living()):
                self._came.clear()
                await self._came.wait()
            shares = {owner: left[at :: len(living)] for at, owner in enumerate(living)}
            left = []

            async def ask(owner: int, mine: list[int]) -> list[int]:
                async def one(link: CollectorLink) -> None:
                    found.append(await link.evaluate(mine, step))

                return [] if not mine or await self.tell(owner, one) else mine

            for rest in await asyncio.gather(*(ask(owner, mine) for owner, mine in shares.items())):
                left += rest
        return found

    async def died(self, owner: int) -> None:
        """It is known of a collector that it has died; another one comes in its place."""
        link = self._links[owner]
        if link is not None:
            await self._died(owner, link, LinkLostError("its process has ended"))

    async def replace(self, owner: int, link: CollectorLink) -> None:
        """A new collector in the place of one that has died."""
        await self.died(owner)
        self._listeners[owner].cancel()
        self._links[owner] = link
        self._listeners[owner] = asyncio.create_task(self._listen(owner, link))
        self._came.set()
        if self._held:
            await self.tell(owner, lambda link: link.hold())
        await self._send(owner)

    async def close(self) -> None:
        """Listen no more."""
        tasks = [*self._listeners.values(), *self._working]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self, owner: int, link: CollectorLink) -> None:
        """Take in what a collector has to tell, until it answers no more."""
        try:
            while True:
                news = await link.news()
                if self._links[owner] is not link:
                    return  # its groups are being made anew: what it has told is of no use
                self._looked_up.difference_update(news.missing, (facts.group for facts in news.finished))
                await self._whole(self._told(owner, news))
        except LinkLostError as error:
            await self._whole(self._died(owner, link, error))
        except Exception as error:  # whoever waits for the step raises it
            self._fault(error)

    async def _whole(self, work: Coroutine[Any, Any, None]) -> None:
        """Work that is not left half done where the listener ends meanwhile, because its collector was replaced."""
        task = asyncio.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._worked)
        await asyncio.shield(task)

    def _worked(self, task: asyncio.Task[None]) -> None:
        self._working.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault(error)

    async def _send(self, owner: int) -> None:
        if self._links[owner] is None:
            return
        tasks, self._posted[owner] = self._posted[owner], []
        if tasks:
            await self.tell(owner, lambda link: link.begin(tasks))

    async def _died(self, owner: int, link: CollectorLink, error: LinkLostError) -> None:
        if self._links[owner] is link:
            log.warning("collector %d answers no more: %s", owner, error)
            self._links[owner] = None
            self._posted[owner] = []  # lost with the rest of its groups, which are given to others now
            await self._lost(owner)
