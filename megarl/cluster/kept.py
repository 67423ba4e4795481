"""What servers a run keeps where it goes back to its last checkpoint: those that are well, without what was asked of them.

Ranks, collectors and their coordinator are made anew; so is a server that does not let go in time. Weights come as to a server
that has just started: whole, and verified before anybody asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.exceptions import RayError

from megarl.cluster.healing import ALIVE, Member, State
from megarl.cluster.nodes import Nodes
from megarl.cluster.server_start import Starter
from megarl.cluster.servers import ServerPool
from megarl.cluster.slots import ServerSlot
from megarl.cluster.waits import Call, Worker
from megarl.core.errors import MegarlError
from megarl.core.log import get_logger
from megarl.serving.client import ServerEndpoint

log = get_logger(__name__)

RELEASE_S = 20.0  # longest wait for a server to end what it was asked, and to take back its memory
STOP_S = 15.0  # longest wait for one that is not kept to end


@dataclass(frozen=True)
class KeptPool:
    """Servers that are up and idle, by their numbers, and the router, which knows none. slots: of all servers."""

    starter: Starter
    slots: Sequence[ServerSlot]
    members: Mapping[int, Member]
    router: Worker
    endpoint: ServerEndpoint


def keep(pool: ServerPool, slots: Sequence[ServerSlot], others: Sequence[Worker], nodes: Nodes) -> KeptPool | None:
    """End everybody else, and free the servers that are well of what they were asked; None where nothing can be kept.

    others: ranks, collectors and their coordinator. What goes wrong is only said: everything is then made anew.
    """
    waiter = pool.waiter
    for seen in (waiter.watches, waiter.notices, waiter.followed):
        seen.clear()  # nobody is started again in this life
    if nodes.services.ended() or nodes.lost() or not pool.router_up:
        return None
    try:
        _end(others, nodes)
        members = {member.index: member for member in pool.members if _is_free(pool, member)}
        for member in pool.members:
            if member.index in members:
                member.state, member.left, member.for_good = State.READY, None, False
            else:
                _stop(member)
    except (MegarlError, RayError) as error:
        log.warning("the servers are started anew, too: %s", str(error).splitlines()[0])
        return None
    log.info("%d of %d servers are kept, with the router", len(members), len(pool.members))
    return KeptPool(pool.starter, slots, members, pool.router, pool.endpoint)


def _end(workers: Sequence[Worker], nodes: Nodes) -> None:
    """Kill processes: Ray asks them to end, and one that is frozen does not hear it."""
    pids: dict[str, list[int]] = {}
    for worker in workers:
        ray.kill(worker.handle)
        if worker.facts.pid:
            pids.setdefault(worker.facts.address, []).append(worker.facts.pid)
    nodes.end(pids)


def _is_free(pool: ServerPool, member: Member) -> bool:
    """Whether a server is up, and free for another life."""
    if member.server is None or member.state not in ALIVE:
        return False
    first, url = member.parts[0], member.server.endpoint.url
    calls = [
        Call(first, first.handle.release.remote(RELEASE_S)),
        Call(pool.router, pool.router.handle.remove.remote(url)),
    ]
    try:
        trouble, _ = pool.waiter.wait(calls, phase="release", role="rollout", deadline_s=2 * RELEASE_S)
    except MegarlError as error:
        trouble = str(error)
    if trouble:
        log.warning("%s is not kept: %s", member.name, trouble.splitlines()[0])
    return not trouble


def _stop(member: Member) -> None:
    if not member.parts:
        return  # nothing of it is left
    stops = [part.handle.stop.remote() for part in member.parts]
    ray.wait(stops, num_returns=len(stops), timeout=STOP_S)
    for part in member.parts:
        ray.kill(part.handle)
