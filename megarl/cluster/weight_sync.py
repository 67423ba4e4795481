"""A weight sync as the loop sees it: the ranks send, the servers acknowledge, and a probe proves it."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.cluster.ranks import RankGroup
from megarl.cluster.rollout import CACHE, RolloutPool
from megarl.core.errors import MegarlError, SyncError, WorkerDiedError
from megarl.core.layout import Layout
from megarl.core.log import get_logger
from megarl.recipe.roles import ServerPart
from megarl.recipe.schema import Recipe
from megarl.sync.session import SyncReport
from megarl.sync.transport import Sending

log = get_logger(__name__)

LEAVE_S = 10.0  # longest wait for a server to give up a group
# float32 log-probs of two implementations agree to about 1e-5; bfloat16 rounds weights of both, but sums differently.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.3}
UNSCALED = 1.0
WEIGHTS: tuple[ServerPart, ...] = ("weights",)


@dataclass
class WeightSync:
    """Sends one role's weights to every server of the pool that is up. sending: by what transport."""

    role: str
    ranks: RankGroup
    layout: Layout
    rollout: RolloutPool
    recipe: Recipe
    sending: Sending
    _version: int | None = None  # of the last push

    def __post_init__(self) -> None:
        self.rollout.servers.refresh = self.again

    def push(self, weight_version: int) -> dict[str, float]:
        """Send, then verify. A server that fails leaves the pool, and one that came back joins it.

        Where none is left, those that are being started in their place are waited for. Without servers, or without proof,
        the run stops. Raises SyncError, WorkerDiedError, DeadlineError.
        """
        self.rollout.pause()
        metrics = self._deliver(weight_version)
        self.rollout.resume(weight_version)
        return metrics

    def _deliver(self, weight_version: int) -> dict[str, float]:
        """Send and verify, until there is a server that has them."""
        servers = self.rollout.servers
        self._version = weight_version
        metrics: dict[str, float] = {}
        while not metrics or not servers.servers:
            servers.await_ready()
            # Room for what comes. Their cache is offloaded until the ranks have sent, and counted what they expect.
            servers.wake(WEIGHTS, self.recipe.deadlines.sync_s)
            metrics = {"sync/bytes": self._send(weight_version)}
            self.rollout.arrived()
            if servers.holding():
                metrics |= self.verify(weight_version)
        return {
            **metrics,
            "sync/weight_version": float(weight_version),
            "sync/servers": float(len(servers.servers)),
            "rollout/server_restarts": float(servers.restarts.total),
        }

    def again(self) -> None:
        """Send the last push's weights again, while samples are asked for: nobody who serves is left to answer.

        The ranks have to hold these weights still.
        """
        if self._version is not None:
            self._deliver(self._version)
            self.rollout.servers.wake(CACHE, self.recipe.deadlines.sync_s)  # the probe has sent it to sleep

    def leave(self) -> None:
        """Have the servers give up what they hold of the way that weights came: they go on without this run.

        What goes wrong is only said: the run has ended, or ends of something else.
        """
        endpoints = [server.endpoint for server in self.rollout.servers.receivers()]
        try:
            [failed] = self.ranks.ask(
                lambda worker, _: worker.handle.leave_servers.remote(endpoints, LEAVE_S),
                "end",
                self.role,
                2 * LEAVE_S,
                only=[0],
            ).wait()
        except MegarlError as error:
            failed = {"the first rank": str(error).splitlines()[0]}
        for name, why in failed.items():
            log.warning("%s did not leave the group of the weight sync: %s", name, why)

    def _send(self, weight_version: int) -> float:
        """Bytes that were sent to all servers that are up. Those that failed leave the pool."""
        servers, keep_kv = self.rollout.servers, self.rollout.keeps_kv
        endpoints = [server.endpoint for server in servers.receivers()]
        reports: list[SyncReport | None] = self.ranks.ask(
            lambda worker, _: worker.handle.send_weights.remote(
                self.role, weight_version, endpoints, self.sending, keep_kv
            ),
            "sync",
            self.role,
            # Rank 0 gives up one attempt after this time; a broadcast may need one more for every server that failed.
            self.sending.timeout_s * (1 + len(endpoints)),
        ).wait()
        report = reports[0]
        if report is None:
            raise SyncError(f"Rank 0 sent nothing for weight version {weight_version}.")
        servers.received([endpoint for endpoint in endpoints if endpoint.name in report.ok])
        for endpoint in endpoints:
            if endpoint.name in report.failed:
                servers.drop(endpoint, f"It failed the weight sync: {report.failed[endpoint.name]}")
        return float(report.num_bytes)

    def verify(self, weight_version: int) -> dict[str, float]:
        """Prove, on a few sequences, that every server holds the trainer's weights. Raises SyncError with the numbers.

        A collector asks them; where it dies, the one in its place does.
        """
        while True:
            try:
                return self._verify(weight_version)
            except WorkerDiedError as error:
                if not self.rollout.collectors.replaced(error):
                    raise

    def _verify(self, weight_version: int) -> dict[str, float]:
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
        return {"sync/probe_diff_max": self.rollout.verify(column, tolerance, weight_version)}
