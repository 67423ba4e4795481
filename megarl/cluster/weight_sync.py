"""A weight sync as the loop sees it: the ranks send, the servers acknowledge, and a probe proves it."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.cluster.ranks import RankGroup
from megarl.cluster.rollout import RolloutPool
from megarl.core.errors import SyncError
from megarl.core.layout import Layout
from megarl.recipe.roles import ServerPart
from megarl.recipe.schema import Recipe
from megarl.sync.broadcast import SyncReport

# float32 log-probs of two implementations agree to about 1e-5; bfloat16 rounds weights of both, but sums differently.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.3}
UNSCALED = 1.0
WEIGHTS: tuple[ServerPart, ...] = ("weights",)


@dataclass(frozen=True)
class WeightSync:
    """Sends one role's weights to every server of the pool."""

    role: str
    ranks: RankGroup
    layout: Layout
    rollout: RolloutPool
    recipe: Recipe

    def push(self, weight_version: int) -> dict[str, float]:
        """Send, then verify. A server that fails leaves the pool; without servers, or without proof, the run stops.

        Raises SyncError, WorkerDiedError, DeadlineError.
        """
        settings, deadline_s = self.recipe.sync, self.recipe.deadlines.sync_s
        # Room for what comes. Their cache is offloaded until the ranks have sent, and counted what they expect.
        self.rollout.servers.wake(WEIGHTS, deadline_s)
        endpoints = [server.endpoint for server in self.rollout.servers.servers]
        reports: list[SyncReport | None] = self.ranks.ask(
            lambda worker, _: worker.handle.send_weights.remote(
                self.role, weight_version, endpoints, settings.bucket_mb * 2**20, deadline_s
            ),
            "sync",
            self.role,
            # Rank 0 gives up one attempt after `deadline_s`; one more may follow for every server that failed.
            deadline_s * (1 + len(endpoints)),
        ).wait()
        report = reports[0]
        if report is None:
            raise SyncError(f"Rank 0 sent nothing for weight version {weight_version}.")
        for endpoint in endpoints:
            if endpoint.name in report.failed:
                self.rollout.servers.drop(endpoint, f"It failed the weight sync: {report.failed[endpoint.name]}")
        return {
            **self.verify(weight_version),
            "sync/bytes": float(report.num_bytes),
            "sync/weight_version": float(weight_version),
            "sync/servers": float(len(self.rollout.servers.servers)),
        }

    def verify(self, weight_version: int) -> dict[str, float]:
        """Prove, on a few sequences, that every server holds the trainer's weights. Raises SyncError with the numbers."""
        plan, block = self.rollout.probe()
        column = self.ranks.ask_columns(
            lambda worker, _: worker.handle.logprobs.options(num_returns=2).remote(self.role, UNSCALED, 1, plan, block),
            self.layout,
            1,
            "sync",
            self.role,
            self.recipe.deadlines.sync_s,
        ).wait()[0][0]
        tolerance = self.recipe.sync.tolerance or TOLERANCES[self.recipe.model.dtype]
        result = self.rollout.verify(column, tolerance, weight_version)
        for server in list(self.rollout.servers.servers):
            if server.endpoint.name in result.failed:
                self.rollout.servers.drop(server.endpoint, result.failed[server.endpoint.name])
        return {"sync/probe_diff_max": result.diff_max}
