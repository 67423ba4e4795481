"""The machines of a run: what they have in common, whether they reach each other, and that nothing is left on them.

One small actor a node looks after it (node_actor.py). Not for the work of the run: ranks and servers are elsewhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.checks import (
    Broken,
    NodeFacts,
    check_clocks,
    check_interfaces,
    check_links,
    check_paths,
    check_versions,
    clock_diff,
    describe_devices,
)
from megarl.cluster.node_actor import GONE, NodeActor, end_of_run
from megarl.cluster.services import Services
from megarl.cluster.stacks import PY_SPY_S, foreign_stack
from megarl.core.errors import DeadlineError, MegarlError, UserError
from megarl.core.log import get_logger
from megarl.core.process_state import stopped_of
from megarl.core.ray_env import nodes_of_ray
from megarl.core.scratch import REGISTRY
from megarl.hub.names import in_cache

log = get_logger(__name__)

DEVICES_S = 60.0  # longest wait for nodes that have not come yet
DEVICES_POLL_S = 0.2
ACTORS_S = 60.0  # longest wait for the nodes' own actors
CALL_S = 10.0  # longest wait for an answer of one of them, beside the work that it is about
PROBE_S = 6.0  # longest wait for a peer to send a few kilobytes back
FETCH_S = 6 * 3600.0  # longest wait for nodes to download a model; the library gives up a connection that stands still
TELL_EVERY_S = 60.0  # how often people are told which nodes have not answered yet
GIVE_UP_S = 45.0  # within which Ray gives up a node that nobody reaches (core/ray_env.py)
CLEAN_S = 10.0  # longest wait for a node to end what is left on it


@dataclass(frozen=True)
class Node:
    """One machine.

    name: its hostname. address: by which the others reach it. ray_id: Ray's name for it. temp: folder for sockets and
    temporary files, on its own disk. devices: of the platform's, as Ray counts them. joined: its Ray is not this run's,
    so that processes do not inherit where their temporary files go.
    """

    name: str
    address: str
    ray_id: str
    temp: Path
    devices: int
    joined: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"

    @property
    def registry(self) -> Path:
        """File with the names of the node's shared memory that is to be removed when the run ends."""
        return self.temp / REGISTRY


@dataclass
class Nodes:
    """All machines of a run, the driver's first. A run that started its own Ray has one, and no actor on it.

    facts and actors: by Ray's name for the node. run_id: of the run. services: Ray's own processes on the driver's.
    """

    members: tuple[Node, ...] = ()
    facts: Mapping[str, NodeFacts] = field(default_factory=dict)
    actors: Mapping[str, Any] = field(default_factory=dict)
    run_id: str = ""
    services: Services = field(default_factory=Services)

    @classmethod
    def join(cls, run_id: str, resource: str, num_devices: int, paths: Mapping[Path, Path], spares: int = 0) -> Nodes:
        """Look at every node of the Ray that was joined, once it has all devices.

        paths: what all nodes have to see, by what tells that they do. spares: so many nodes are looked at, and left alone.
        Raises DeadlineError, MegarlError and UserError that name nodes.
        """
        rows = await_devices(resource, num_devices)
        actors = {
            row["NodeID"]: ray.remote(NodeActor)
            .options(
                num_cpus=0,
                max_concurrency=4,
                scheduling_strategy=NodeAffinitySchedulingStrategy(row["NodeID"], soft=False),
            )
            .remote(row["NodeManagerAddress"], run_id)
            for row in rows
        }
        names = {row["NodeID"]: name_of(row) for row in rows}
        _fetch(actors, names, [path for path in paths if in_cache(path)])
        answers, failed = _ask({key: actor.facts.remote(paths) for key, actor in actors.items()}, ACTORS_S)
        if failed:
            lines = "\n".join(f"  {names[key]}: {why}" for key, why in failed.items())
            raise DeadlineError(f"No process of the run could be started on these nodes:\n{lines}")
        facts: dict[str, NodeFacts] = answers
        devices = {row["NodeID"]: int(row["Resources"].get(resource, 0)) for row in rows}
        members = tuple(
            Node(fact.name, fact.address, key, fact.temp, devices[key], joined=True) for key, fact in facts.items()
        )
        members = without_spares(members, num_devices, spares)
        nodes = cls(members, facts, actors, run_id, Services.find(members[0].ray_id))
        nodes._check()
        return nodes

    def _check(self) -> None:
        facts = list(self.facts.values())
        check_interfaces(facts)
        check_versions(facts)
        check_paths(facts)
        check_clocks({str(node): self._clock_diff(node) for node in self.members[1:]})
        check_links(self.broken())

    def _clock_diff(self, node: Node) -> float:
        sent = time.time()
        remote = self._tell(node, self.actors[node.ray_id].clock.remote())
        return clock_diff(sent, remote, time.time())

    def _tell(self, node: Node, call: Any) -> Any:
        answers, failed = _ask({"": call}, CALL_S)
        if failed:
            raise DeadlineError(f"{node}: {failed['']}")
        return answers[""]

    def free_port(self, node: Node) -> int:
        """A port that is free on a node's address."""
        return int(self._tell(node, self.actors[node.ray_id].free_port.remote()))

    def broken(self) -> list[Broken]:
        """Links that do not work now, in either direction, between nodes that Ray has not given up."""
        alive = {row["NodeID"] for row in ray.nodes() if row["Alive"]} if self.actors else set()
        members = [node for node in self.members if node.ray_id in alive]
        if len(members) < 2:
            return []
        places = {node.ray_id: (node.address, self.facts[node.ray_id].port) for node in members}
        asked = {
            node.ray_id: self.actors[node.ray_id].probe.remote(
                [places[peer.ray_id] for peer in members if peer is not node], PROBE_S
            )
            for node in members
        }
        answers, failed = _ask(asked, PROBE_S + CALL_S)
        found = [
            Broken(str(node), str(peer), self.facts[node.ray_id].interface, reason)
            for node in members
            if node.ray_id in answers
            for peer, reason in zip((peer for peer in members if peer is not node), answers[node.ray_id], strict=True)
            if reason
        ]
        here = self.members[0]
        return found + [
            Broken(str(here), str(node), self.facts[here.ray_id].interface, failed[node.ray_id])
            for node in members
            if node.ray_id in failed
        ]

    def lost(self) -> dict[str, str]:
        """Nodes of the run that Ray has given up, and why."""
        if not self.actors:
            return {}
        dead = {row["NodeID"]: row for row in ray.nodes() if not row["Alive"]}
        return {str(node): _why_dead(dead[node.ray_id]) for node in self.members if node.ray_id in dead}

    def replaceable(self) -> bool:
        """Whether there are as many nodes as the run has taken, the lost ones not counted."""
        return len([row for row in ray.nodes() if row["Alive"]]) >= len(self.members)

    def await_lost(self) -> bool:
        """Whether Ray gives up a node of the run by and by: where links are broken, that is seen before."""
        end = time.monotonic() + GIVE_UP_S
        while not self.lost():
            if time.monotonic() > end or not self.broken():
                return False
            time.sleep(DEVICES_POLL_S)
        return True

    def broken_for_certain(self) -> list[Broken]:
        """Links that do not work now and did not a moment ago: a node that is only busy is no broken link."""
        before = {(each.source, each.target) for each in self.broken()}
        return [each for each in self.broken() if (each.source, each.target) in before] if before else []

    def signal(self, address: str, pid: int, number: int) -> str:
        """Send a signal to a process of the run, on whatever node it is; why not, or nothing."""
        actor = self.actor_at(address)
        if actor is not None:
            answers, failed = _ask({"": actor.signal.remote(pid, number)}, CALL_S)
            return str(answers.get("", failed.get("")))
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return GONE
        return ""

    def end(self, pids: Mapping[str, Sequence[int]]) -> None:
        """Kill processes of the run, by the addresses of their nodes. Raises DeadlineError where a node does not answer."""
        asked = {}
        for address, some in pids.items():
            if (actor := self.actor_at(address)) is None:
                end_of_run(self.run_id, some)
            else:
                asked[address] = actor.end.remote(some)
        failed = _ask(asked, CLEAN_S)[1]
        if failed:
            raise DeadlineError(f"These nodes did not end processes of the run: {failed}.")

    def foreign_stack(self, address: str, pid: int) -> str:
        """All stacks of a process, on whatever node it is, read from outside; or why there are none."""
        actor = self.actor_at(address)
        if actor is None:
            return foreign_stack(pid)
        answers, failed = _ask({"": actor.foreign_stack.remote(pid)}, CALL_S + PY_SPY_S)
        return str(answers.get("", f"({failed.get('')})"))

    def actor_at(self, address: str) -> Any:
        """The actor that looks after a node; None where there is none."""
        return next(
            (self.actors[node.ray_id] for node in self.members if node.address == address and self.actors), None
        )

    def stopped(self) -> list[str]:
        """Processes of the run that stand still, on any node that answers, for people."""
        if not self.actors:
            return [str(each) for each in stopped_of(self.run_id)] if self.run_id else []
        answers, _ = _ask({key: actor.stopped.remote() for key, actor in self.actors.items()}, CALL_S)
        return [f"{each} on {node}" for node in self.members for each in answers.get(node.ray_id, ())]

    def clean(self) -> None:
        """End what is left of the run on every node that can be reached, side by side."""
        if self.services.ended():
            return  # nobody can be reached by this Ray; their janitors do it
        try:
            answers, failed = _ask({key: actor.clean.remote() for key, actor in self.actors.items()}, CLEAN_S)
        except MegarlError as error:  # it would hide what the run ended with; the janitors come last
            log.warning("could not look after all nodes in the end: %s", error)
            return
        for node in self.members:
            if answers.get(node.ray_id):
                log.info("ended %d processes that were still there on %s", answers[node.ray_id], node)
            elif node.ray_id in failed:
                log.warning("could not look after %s in the end: %s", node, failed[node.ray_id])


def _fetch(actors: Mapping[str, Any], names: Mapping[str, str], paths: Sequence[Path]) -> None:
    """Every node gets what it lacks of the hub's models and data sets, for itself. Raises DeadlineError and UserError."""
    if not paths:
        return

    def tell(slow: Sequence[str], waited_s: float) -> None:
        log.warning(
            "waiting for nodes to get what the hub has, since %.0f s: %s",
            waited_s,
            ", ".join(names[key] for key in slow),
        )

    answers, failed = _ask({key: actor.fetch.remote(paths) for key, actor in actors.items()}, FETCH_S, tell)
    if failed:
        lines = "\n".join(f"  {names[key]}: {why}" for key, why in failed.items())
        raise DeadlineError(f"What the hub has did not come to these nodes:\n{lines}")
    wrong = {names[key]: answer for key, answer in answers.items() if answer}
    if wrong:
        lines = "\n".join(f"  {name}: {why}" for name, why in wrong.items())
        raise UserError(
            f"Nodes could not get what the hub has. Let them reach it, or set HF_HOME to a folder that all share:\n{lines}"
        )


def await_devices(resource: str, wanted: int, deadline_s: float = DEVICES_S) -> list[dict[str, Any]]:
    """Ray's rows of all living nodes, the driver's own first, once they have so many devices. Raises DeadlineError.

    Where it is said how many nodes there are, all have their time to join: servers may have devices beside these.
    """
    end = time.monotonic() + deadline_s
    while True:
        rows = ray.nodes()
        alive = [row for row in rows if row["Alive"]]
        there = {name_of(row): row["Resources"].get(resource, 0.0) for row in alive}
        if sum(there.values()) >= wanted and (len(rows) >= (nodes_of_ray() or 0) or time.monotonic() > end):
            here = ray.get_runtime_context().get_node_id()
            return sorted(alive, key=lambda row: (row["NodeID"] != here, _natural(row["NodeManagerAddress"])))
        if time.monotonic() > end:
            dead = {name_of(row): _why_dead(row) for row in rows if not row["Alive"]}
            raise DeadlineError(
                f"{describe_devices(wanted, resource, there, dead)}\nWaited {deadline_s:g} s for more to join."
            )
        time.sleep(DEVICES_POLL_S)


def without_spares(nodes: Sequence[Node], num_devices: int, spares: int) -> tuple[Node, ...]:
    """The nodes that the run takes, of those that there are; a spare stays one until another node is lost.

    Raises UserError where the others have too few devices.
    """
    if not spares:
        return tuple(nodes)
    first = len({row["NodeManagerAddress"] for row in ray.nodes()}) - spares  # Ray names lost ones, too
    taken = tuple(nodes[: max(1, first)])
    if sum(node.devices for node in taken) < num_devices:
        raise UserError(
            f"cluster.spares is {spares}, and the other {len(taken)} of {len(nodes)} nodes have "
            f"{sum(node.devices for node in taken)} devices: the run needs {num_devices}. Take more nodes, or fewer spares."
        )
    return taken


def name_of(row: Mapping[str, Any]) -> str:
    """A node of Ray's, for people."""
    return f"{row['NodeManagerHostname']} ({row['NodeManagerAddress']})"


def _why_dead(row: Mapping[str, Any]) -> str:
    return str(row.get("DeathReasonMessage") or "Ray does not say why")


def _natural(address: str) -> tuple[tuple[int, str], ...]:
    """10.0.0.9 before 10.0.0.10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in address.split("."))


def _ask(
    calls: Mapping[str, Any], timeout_s: float, tell: Callable[[Sequence[str], float], None] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Answers to calls, and what became of those without one. tell: now and then, which have none after how many seconds."""
    began, left = time.monotonic(), list(calls.values())
    while left and (rest_s := began + timeout_s - time.monotonic()) > 0:
        _, left = ray.wait(left, num_returns=len(left), timeout=rest_s if tell is None else min(rest_s, TELL_EVERY_S))
        if tell is not None and left:
            tell([key for key, ref in calls.items() if ref in left], time.monotonic() - began)
    answers: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for key, ref in calls.items():
        if ref in left:
            failed[key] = f"no answer within {timeout_s:g} s"
            continue
        try:
            answers[key] = ray.get(ref)
        except RayTaskError as error:
            raise MegarlError(f"A node's own actor failed: {error}") from error
        except RayError as error:
            failed[key] = f"its process is gone: {error}"
    return answers, failed
