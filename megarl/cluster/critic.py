"""The critic's handle in a run: its update goes on beside whatever does not need its devices.

A critic that shares the actor's ranks is waited for at once; one that shares devices with servers alone, before these get
new weights; one with devices of its own learns while the next samples are generated. Whoever waits for it, the seconds
count in the phase `critic`, and an error of its update comes before one of what was asked of it afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megarl.core.pending import Joined, Once
from megarl.core.protocols import Critic, Metrics, Pending, References, WeightSync
from megarl.core.timing import PhaseTimer


@dataclass
class LearningCritic:
    """A critic, and what it still learns. at_once: an update is waited for as it begins."""

    role: Critic
    timer: PhaseTimer
    at_once: bool
    _learning: list[Once[Metrics]] = field(default_factory=list)  # updates that nobody may have waited for

    def update(self, batch: Any, columns: dict[str, References]) -> Pending[Metrics]:
        """Begin to learn from a step."""
        learning = Once(self.role.update(batch, columns), self.timer, "critic")
        self._learning.append(learning)
        if self.at_once:
            self.settle()
        return learning

    def values(self, batch: Any) -> Pending[References]:
        """What it says of every position, once it has learned all that it was given before."""
        asked, learning = self.role.values(batch), self._learning
        self._learning = []
        return Joined([*learning, asked], lambda results: results[-1])

    def settle(self) -> None:
        """Wait until it has learned all that it was given."""
        for learning in self._learning:
            learning.wait()
        self._learning = []


@dataclass(frozen=True)
class SyncAfterCritic:
    """A weight sync whose servers share devices with the critic: these take nothing while it still learns."""

    sync: WeightSync
    critic: LearningCritic

    def push(self, weight_version: int) -> Metrics:
        """Send, then verify, once the critic has learned."""
        self.critic.settle()
        return self.sync.push(weight_version)
