"""Sends the trainer's weights to the servers over torch.distributed: who holds a part sends it, every server receives all.

Each sending rank joins a process group with all servers and broadcasts its buckets; rank 0 tells each server over HTTP what
comes from whom, bucket by bucket in the one order that all ranks know (plan.py). A server that answers with an error, dies, or
is late is named and left out; the groups are made anew without it, and the whole sync repeated for the rest. Whether the
servers then hold the right weights is for verify.py to say.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megarl.core.errors import DeadlineError, MegarlError, SyncError
from megarl.serving.client import ServerClient, ServerEndpoint, ServerError
from megarl.sync.group import BackendName, MeetingPlace, slots
from megarl.sync.member import GIVEN_UP, Attempt, Member, Outcome, members_of
from megarl.sync.outgoing import Outgoing
from megarl.sync.parcel import Parcel
from megarl.sync.session import (
    ATTEMPTS,
    BLAME,
    GRACE_S,
    JOIN_S,
    Clients,
    Failures,
    Stopwatch,
    SyncReport,
    begin,
    bucket_limit_s,
    commit,
    connected,
    everyone,
    failures_of,
    left,
    ranks_failed,
)

Calls = dict[str, asyncio.Task[None]]


class BroadcastSender:
    """The sending end. Every rank of the trainer makes one and calls `send`; rank 0 leads.

    host: this node's address, as the servers reach it. backend: for servers on devices of their own; NCCL refuses two
    processes on one device, so that gloo serves those that share the ranks'. control: the trainer ranks' own process
    group; None where there is one rank. timeout_s: longest single attempt. join_s: how long a broadcast waits for its members.
    """

    def __init__(
        self,
        *,
        rank: int,
        host: str,
        device: str,
        backend: BackendName,
        timeout_s: float,
        control: dist.ProcessGroup | None = None,
        grace_s: float = GRACE_S,
        join_s: float = JOIN_S,
    ) -> None:
        self._rank = rank
        self._backend: BackendName = backend
        self._timeout_s = timeout_s
        self._grace_s, self._join_s = grace_s, join_s
        self._member = Member(rank, host, torch.device(device), control, grace_s, join_s)
        # Servers refuse a group whose name they have seen: a later sender's must differ from this one's.
        self._name = uuid.uuid4().hex[:12]
        self._attempts = 0
        self._asked: dict[str, list[str]] = {}  # by a server's URL, the groups that it was asked to join
        self._names: dict[int, str] = {}  # of the groups that are open, by sender
        self._places: dict[int, MeetingPlace] = {}
        self._flush_cache = True
        self._watch = Stopwatch()

    def backend_for(self, servers: Sequence[ServerEndpoint]) -> BackendName:
        """The backend that these servers are reached with."""
        return "gloo" if any(server.shares_devices for server in servers) else self._backend

    def send(
        self, outgoing: Outgoing, version: int, servers: Sequence[ServerEndpoint], *, flush_cache: bool = True
    ) -> SyncReport | None:
        """Send all buckets to all servers and give them the version; None on every rank but 0.

        flush_cache: servers forget what they computed with the old weights. False for servers that hold requests in place:
        flushing would end them (`ServerClient.pause`).

        A server's failure is no exception: the report names it. Where no server is left, `ok` is empty.
        Raises SyncError when the sending itself fails.
        """
        if self._rank == 0:
            self._flush_cache = flush_cache
            return asyncio.run(self._lead(outgoing, version, servers))
        nothing: Attempt | None = None
        while (attempt := self._member.word(nothing)) is not None:
            if attempt.joins:
                addresses = self._member.open(attempt, outgoing.parcels)
                self._member.share(self._member.join(attempt, addresses))
            if self._member.word(False):
                self._member.share(self._member.stream(outgoing, attempt.seconds))
        return None

    def close(self) -> None:
        """Leave the groups."""
        self._places = {}
        self._member.close()

    def leave(self, servers: Sequence[ServerEndpoint], deadline_s: float) -> dict[str, str]:
        """Leave the groups, and have these servers give up whatever they hold of them; who did not, and why.

        For servers that go on without this process. Rank 0's alone to do.
        """
        self.close()
        return asyncio.run(self._end_groups(servers, deadline_s))

    async def _end_groups(self, servers: Sequence[ServerEndpoint], deadline_s: float) -> dict[str, str]:
        async with connected(servers) as clients:
            failures = await everyone(clients, lambda client: self._end_groups_of(client, deadline_s))
        return {name: str(error) for name, error in failures.items()}

    async def _end_groups_of(self, client: ServerClient, deadline_s: float) -> None:
        """Also those that a server was in before it went and came back. deadline_s: of each."""
        names = self._asked.get(client.endpoint.url, [])
        while names:
            try:
                await client.destroy_group(names[-1], deadline_s)
            except ServerError as error:
                if "does not exist" not in str(error):
                    raise
            names.pop()

    async def _lead(self, outgoing: Outgoing, version: int, servers: Sequence[ServerEndpoint]) -> SyncReport:
        began = time.monotonic()
        last = began + (ATTEMPTS - 1) * (self._timeout_s + BLAME * self._grace_s)
        failed: dict[str, str] = {}
        num_bytes = attempts = 0
        async with connected(servers) as clients:
            remaining = list(servers)
            try:
                while remaining:
                    if attempts and time.monotonic() > last:
                        raise _given_up(attempts, time.monotonic() - began, failed)
                    attempts += 1
                    here = {server.name: clients[server.name] for server in remaining}
                    self._watch = Stopwatch()
                    failures, num_bytes, again = await self._attempt(outgoing, version, remaining, here)
                    failed |= {name: str(error) for name, error in failures.items()}
                    remaining = [server for server in remaining if server.name not in failures]
                    if not again:
                        break
            except BaseException as error:
                # Raised after all ranks have said how they fared: they wait for the word.
                if isinstance(error, SyncError):
                    await asyncio.to_thread(self._member.word, None)
                await self._give_up(clients, {})
                raise
            await asyncio.to_thread(self._member.word, None)
        ok = tuple(server.name for server in remaining)
        return SyncReport(version, ok, failed, num_bytes, time.monotonic() - began, attempts, self._watch.seconds)

    async def _attempt(
        self, outgoing: Outgoing, version: int, servers: list[ServerEndpoint], clients: Clients
    ) -> tuple[Failures, int, bool]:
        """Who failed, bytes sent, and whether the rest need another attempt."""
        end = time.monotonic() + self._timeout_s
        name = f"megarl-{self._name}-{self._attempts}"
        self._attempts += 1
        joins = not self._member.is_joined(servers, outgoing.parcels)
        attempt = Attempt(tuple(servers), name, self.backend_for(servers), self._timeout_s, joins)
        await asyncio.to_thread(self._member.word, attempt)
        try:
            failures = await self._join(attempt, outgoing.parcels, clients, end) if joins else {}
        except SyncError:
            await asyncio.to_thread(self._member.word, False)
            raise
        if not failures:
            failures = await everyone(clients, lambda client: begin(client, end))
        await asyncio.to_thread(self._member.word, not failures)
        if failures:
            return await self._give_up(clients, failures), 0, True
        self._watch.lap("begin")
        failures, num_bytes = await self._stream(outgoing, clients, end)
        if failures:
            return await self._give_up(clients, failures), num_bytes, True
        # From here on a server that fails takes nothing from the others.
        failures = await everyone(clients, lambda client: commit(client, version, end))
        self._watch.lap("commit")
        return failures, num_bytes, False

    async def _join(self, attempt: Attempt, parcels: Sequence[Parcel], clients: Clients, end: float) -> Failures:
        """Make groups with exactly these servers."""
        addresses = await asyncio.to_thread(self._member.open, attempt, parcels)
        self._places = {sender: MeetingPlace.find(address, left(end)) for sender, address in addresses.items()}
        self._names = {sender: attempt.group(sender) for sender in addresses}
        if stuck := await self._end_old_groups(clients):
            self._tell_to_give_up()
            await asyncio.to_thread(self._member.share, await asyncio.to_thread(self._member.join, attempt, addresses))
            return stuck
        joining = asyncio.create_task(asyncio.to_thread(self._member.join, attempt, addresses))
        calls: Calls = {}
        first: Failures = {}
        for sender, members in members_of(parcels).items():
            calls = self._call_together(attempt, sender, members, clients, end)
            while not _all_well(calls) and not (first := failures_of(calls)) and time.monotonic() < end:
                await asyncio.wait(calls.values(), timeout=left(end), return_when=asyncio.FIRST_EXCEPTION)
            if not _all_well(calls):
                tps = {server.name: server.tp for server in attempt.servers}
                coming = sum(tps[name] for name, call in calls.items() if not call.done())
                self._tell_to_give_up({sender: coming})
                break
            self._places[sender].all_come()
        reasons = await asyncio.to_thread(self._member.share, await joining)
        return await self._settle(calls, first, next(filter(None, reasons), None))

    async def _end_old_groups(self, clients: Clients) -> Failures:
        """Have servers give up the groups of former attempts, which this side has left: each takes memory and connections.

        Who does not answer. One that cannot has nothing of the group left to give up.
        """
        failures = await everyone(clients, lambda client: self._end_groups_of(client, self._grace_s))
        return {name: error for name, error in failures.items() if not isinstance(error, ServerError)}

    def _call_together(
        self, attempt: Attempt, sender: int, members: Sequence[int], clients: Clients, end: float
    ) -> Calls:
        """Ask all servers to join a sender's group."""
        found, world_size = slots(attempt.servers, len(members))
        host, port = self._places[sender].address
        name = attempt.group(sender)
        for server in attempt.servers:
            self._asked.setdefault(server.url, []).append(name)
        return {
            slot.server.name: asyncio.create_task(
                clients[slot.server.name].init_group(
                    host=host,
                    port=port,
                    rank_offset=slot.rank_offset,
                    world_size=world_size,
                    group=name,
                    backend=attempt.backend,
                    # Longer than giving up takes, so that who answers it can be told from who does not.
                    deadline_s=left(end) + 3 * self._grace_s,
                )
            )
            for slot in found
        }

    def _tell_to_give_up(self, coming: Mapping[int, int] | None = None) -> None:
        """Have all members of all groups give up; coming: how many ranks of servers are on their way to a sender's group."""
        for sender, place in self._places.items():
            place.give_up((coming or {}).get(sender, 0))

    async def _stream(self, outgoing: Outgoing, clients: Clients, end: float) -> tuple[Failures, int]:
        """Send every bucket; who failed, and how many bytes were loaded."""
        sending = asyncio.create_task(asyncio.to_thread(self._member.stream, outgoing, left(end)))
        calls: Calls = {}
        first: Failures = {}
        num_bytes, late = 0, ""
        for number, parcel in enumerate(outgoing.parcels):
            calls = self._announce(parcel, clients, end)
            has_begun = partial(self._has_begun, parcel.sender, number)
            await _answered(calls, sending, bucket_limit_s(parcel.nbytes, end, self._join_s), has_begun, end)
            if not _all_well(calls):
                first = failures_of(calls)
                if not first and not has_begun():
                    late = f"rank {parcel.sender} had not put bucket {number} together within {self._timeout_s:g} s"
                self._tell_to_give_up()
                break
            num_bytes += parcel.nbytes
        try:
            mine = await sending
        except Exception:
            await _cancelled(calls)
            raise
        outcomes: list[Outcome] = await asyncio.to_thread(self._member.share, mine)
        self._watch.lap("send and load")
        self._watch.seconds["gather"] = max(outcome.gather_s for outcome in outcomes)
        reason = next((outcome.reason for outcome in outcomes if outcome.reason is not None), None)
        if late:
            await _cancelled(calls)
            raise ranks_failed(f"{late} (deadlines.sync_s).")
        return await self._settle(calls, first, reason), num_bytes

    def _has_begun(self, sender: int, number: int) -> bool:
        """Whether a bucket is on its way. Of a sender who is not there any more others say what happened."""
        try:
            return self._places[sender].has_begun(number)
        except RuntimeError:
            return True

    def _announce(self, parcel: Parcel, clients: Clients, end: float) -> Calls:
        """Tell every server what comes, and from whom."""
        dtypes = [str(dtype).removeprefix("torch.") for dtype in parcel.dtypes]
        return {
            name: asyncio.create_task(
                client.update_from_distributed(
                    parcel.names,
                    dtypes,
                    parcel.shapes,
                    self._names[parcel.sender],
                    left(end) + self._grace_s,
                    flattened=parcel.is_flattened,
                    flush_cache=self._flush_cache,
                )
            )
            for name, client in clients.items()
        }

    async def _settle(self, calls: Calls, first: Failures, reason: str | None) -> Failures:
        """Wait for what is left of the calls and say who is to blame for what went wrong; nobody where all went well.

        Servers that cannot be reached or stay silent are; else those that answered with an error of their own accord.
        The errors of all others are these servers' passed on, so they get another attempt. first: who had failed when
        the attempt was given up. reason: what went wrong on this side.
        """
        if calls:
            await asyncio.wait(calls.values(), timeout=self._grace_s if reason is not None or first else None)
        answered: Failures = {}
        silent: Failures = {}
        for name, call in calls.items():
            if not call.done():
                call.cancel()
                silent[name] = DeadlineError(f"{name} did not answer within {self._grace_s:g} s of a sync given up")
            elif isinstance(error := call.exception(), ServerError):
                answered[name] = error
            elif isinstance(error, MegarlError):
                silent[name] = error
            elif error is not None:
                raise error
        if reason is not None and not silent and not answered:
            raise ranks_failed(reason)
        blamed = silent or {name: error for name, error in answered.items() if name in first} or answered
        if reason is None or reason == GIVEN_UP:
            return blamed
        return {name: SyncError(f"{error} (the ranks' side: {reason})") for name, error in blamed.items()}

    async def _give_up(self, clients: Clients, failures: Failures) -> Failures:
        """Bring the servers that did not fail back to where an attempt starts; those that cannot, fail too."""
        self.close()
        others = {name: client for name, client in clients.items() if name not in failures}
        return failures | await everyone(others, lambda client: client.close_weight_update(self._grace_s))


def _given_up(attempts: int, seconds: float, failed: Mapping[str, str]) -> SyncError:
    told = "; ".join(f"{name}: {why}" for name, why in failed.items())
    return SyncError(
        f"The weight sync was given up after {attempts} attempts in {seconds:.0f} s: in each of them other servers failed "
        f"(deadlines.sync_s is of one attempt). {told}"
    )


async def _answered(
    calls: Calls, sending: asyncio.Task[Outcome], limit_s: float, has_begun: Callable[[], bool], end: float
) -> None:
    """Wait until all have answered, or one call has failed, or this rank could not gather, or the time is over.

    That is `limit_s`, and as much again as long as the bucket is not on its way, which no server can help; at most until `end`.
    """
    until = time.monotonic() + limit_s
    while not failures_of(calls):
        now = time.monotonic()
        if now >= until and (now >= end or has_begun()):
            return
        until = until if now < until else min(end, now + limit_s)
        pending: set[asyncio.Task[Any]] = {call for call in calls.values() if not call.done()}
        if not pending or (sending.done() and sending.exception() is not None):
            return
        watched = pending if sending.done() else {sending, *pending}
        await asyncio.wait(watched, timeout=left(until), return_when=asyncio.FIRST_COMPLETED)


async def _cancelled(calls: Calls) -> None:
    for call in calls.values():
        call.cancel()
    await asyncio.gather(*calls.values(), return_exceptions=True)


def _all_well(calls: Calls) -> bool:
    return all(call.done() for call in calls.values()) and not failures_of(calls)
