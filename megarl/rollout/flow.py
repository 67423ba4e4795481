"""How busy generation is: tokens a second while groups are under way, servers without a request, seconds of the journal."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megarl.rollout.tasks import Load


class Flow:
    """Told when groups begin to be under way, what is made, and when none is any more. clock: seconds that only go up."""

    def __init__(self, num_collectors: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._looked = clock()
        self._busy_s = [0.0] * num_collectors  # seconds that each collector's servers had worked by then
        self._journal_s = [0.0] * num_collectors  # seconds that each collector had written by then
        self._decided_s = 0.0
        self._began: float | None = None  # groups have been under way since
        self._worked_s = 0.0  # seconds with groups under way since the last step, until `_began`
        self._tokens = 0  # of the groups that have finished since then

    def begins(self) -> None:
        """A group is asked for."""
        if self._began is None:
            self._began = self._clock()

    def made(self, tokens: int) -> None:
        """A group has finished, with so many response tokens."""
        self._tokens += tokens

    def ends(self) -> None:
        """No group is under way any more."""
        if self._began is not None:
            self._worked_s, self._began = self._worked_s + self._clock() - self._began, None

    def forget(self, owner: int) -> None:
        """Another collector is in the place of this one."""
        self._busy_s[owner] = self._journal_s[owner] = 0.0

    def metrics(self, loads: Mapping[int, Load], decided_s: float = 0.0) -> dict[str, float]:
        """Of the time since the last step, whichever step its groups are for. loads: of each collector that lives, as of now.

        decided_s: seconds so far in which decisions were written down.
        """
        now = self._clock()
        worked_s = self._worked_s + (now - self._began if self._began is not None else 0.0)
        tokens, self._tokens = self._tokens, 0
        self._worked_s, self._began = 0.0, None if self._began is None else now
        busy_s = [load.busy_s - self._busy_s[owner] for owner, load in loads.items()]
        idle = 1 - sum(busy_s) / max(1, len(busy_s)) / max(1e-9, now - self._looked)
        self._looked = now
        written_s = [load.journal_s - self._journal_s[owner] for owner, load in loads.items()]
        journal_s, self._decided_s = max(written_s, default=0.0) + decided_s - self._decided_s, decided_s
        for owner, load in loads.items():
            self._busy_s[owner], self._journal_s[owner] = load.busy_s, load.journal_s
        return {
            "perf/rollout_tokens_per_s": tokens / worked_s if tokens else 0.0,
            "perf/generation_s": worked_s,
            "perf/journal_s": journal_s,
            "perf/servers_idle": min(1.0, max(0.0, idle)),
            "rollout/requests_queued": float(sum(load.queued for load in loads.values())),
        }
