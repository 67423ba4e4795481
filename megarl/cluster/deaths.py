"""How a process of Ray's died: what the kernel of its node says, what Ray does, and what memory there was.

Ray is the parent of its workers and keeps their exit codes to itself; so each node holds on to those that somebody waits for
(core/endings).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import psutil
import ray
from ray.exceptions import RayActorError, RayError

from megarl.cluster.nodes import Nodes
from megarl.cluster.process import ProcessFacts
from megarl.core.endings import Ending, Endings

ANSWER_S = 5.0  # of another node
# How Ray says that a worker's connection broke off; it adds a page of guesses.
CUT_OFF = "connection error code 2"
WITHOUT_A_WORD = (
    "It ended without a word: it crashed, or something killed it, as the kernel's out-of-memory killer does (see "
    "dmesg)."
)


@dataclass
class Deaths:
    """Holds on to the processes of a run, wherever they are, and says how one ended."""

    nodes: Nodes
    _here: Endings = field(default_factory=Endings)
    _named: set[ProcessFacts] = field(default_factory=set)  # those that are watched

    def watch(self, facts: ProcessFacts) -> None:
        """Somebody waits for it. May be called often."""
        if not facts.pid or facts in self._named:
            return
        self._named.add(facts)
        if (actor := self.nodes.actor_at(facts.address)) is None:
            self._here.watch(facts.pid, facts.started)
        else:
            actor.watch.remote(facts.pid, facts.started)

    def why(self, facts: ProcessFacts, error: RayActorError) -> str:
        """How a process ended, for people. error: what Ray says of it."""
        said = WITHOUT_A_WORD if CUT_OFF in str(error) else _said(error)
        return self.how(facts, said)

    def how(self, facts: ProcessFacts, otherwise: str) -> str:
        """How a process ended, for people. otherwise: what is said where the kernel did not tell it."""
        ending = self._ending(facts)
        here = self.nodes.actor_at(facts.address) is None
        return " ".join(part for part in (ending.how or otherwise, ending.held, _memory() if here else "") if part)

    def _ending(self, facts: ProcessFacts) -> Ending:
        self._named.discard(facts)
        if (actor := self.nodes.actor_at(facts.address)) is None:
            return self._here.told(facts.pid, facts.started)
        try:
            found: Ending = ray.get(actor.ending.remote(facts.pid, facts.started), timeout=ANSWER_S)
        except RayError:
            return Ending()  # its node is gone, which others say
        return found


def _said(error: RayActorError) -> str:
    """What Ray knows."""
    lines = [line.strip() for line in str(error).splitlines() if "worker" in line.lower() or "died" in line.lower()]
    return " ".join(lines[-2:])


def _memory() -> str:
    memory = psutil.virtual_memory()
    return f"Now {memory.available / 1e9:.1f} of this machine's {memory.total / 1e9:.1f} GB are free."
