"""A weight sync as the loop sees it: the ranks send, the servers acknowledge, and a probe, or hashes as well, prove it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.cluster.ranks import RankGroup
from megarl.cluster.rollout import CACHE, RolloutPool
from megarl.core.errors import MegarlError, SyncError
from megarl.core.layout import Layout
from megarl.core.log import get_logger
from megarl.recipe.roles import ServerPart
from megarl.recipe.schema import Recipe
from megarl.serving.client import ServerEndpoint
from megarl.sync.fetch import Order
from megarl.sync.hash_report import HashReport, refuse
from megarl.sync.sending import Sending, Versions
from megarl.sync.session import ATTEMPTS, BLAME, GRACE_S, SyncReport

log = get_logger(__name__)

BLAME_S = BLAME * GRACE_S
LEAVE_S = 10.0  # longest wait for a server to give up a group
# float32 log-probs of two implementations agree to about 1e-5; bfloat16 rounds weights of both, but sums differently.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.3}
# FP8 moves each weight by up to a sixteenth, and the engine rounds activations as well: docs/weight_sync.md.
FP8_TOLERANCE = 2.0
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
    _written: int | None = None  # the last version that the ranks wrote to the disk, where it is good
    _written_bytes: int = 0  # of it, as often as it was written

    def __post_init__(self) -> None:
        self.rollout.servers.refresh = self.again
        self.rollout.pay = self._push

    def push(self, weight_version: int) -> dict[str, float]:
        """Send, then verify. A server that fails leaves the pool, and one that came back joins it.

        Where none is left, those that are being started in their place are waited for. Without servers, or without proof,
        the run stops. Nothing is sent as long as nobody needs it. Raises SyncError, WorkerDiedError, DeadlineError.
        """
        return self._restarts() if self.rollout.owes(weight_version) else self._push(weight_version)

    def _restarts(self) -> dict[str, float]:
        return {"rollout/server_restarts": float(self.rollout.servers.restarts.total)}

    def _push(self, weight_version: int) -> dict[str, float]:
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
            if self.sending.transport != "adapters":  # which make nobody forget anything
                self.rollout.still()
            metrics = {"sync/bytes": self._send(weight_version)}
            self.rollout.arrived()
            metrics |= self._proved(weight_version)
        return {
            **metrics,
            "sync/weight_version": float(weight_version),
            "sync/servers": float(len(servers.servers)),
            **self._restarts(),
        }

    def _proved(self, weight_version: int) -> dict[str, float]:
        """That the weights arrived. Raises SyncError, with what servers wrote of those that they did not load."""
        metrics: dict[str, float] = {}
        try:
            if self.recipe.sync.verify == "hash":
                metrics |= self._compare_hashes(weight_version)
            if self.rollout.servers.holding():
                metrics |= self.verify(weight_version)
        except SyncError as error:
            if said := self.rollout.servers.failed_loads():
                raise SyncError(f"{error}\n{said}") from error
            raise
        return metrics

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
        """Bytes that were sent to all servers that are up, or written. Those that failed leave the pool."""
        servers = self.rollout.servers
        if self.sending.fetched is not None:
            return self._write_and_fetch(weight_version, self.sending.fetched)
        endpoints = [server.endpoint for server in servers.receivers()]
        report = self._ask_ranks(weight_version, endpoints)
        self._settle({endpoint: report.failed.get(endpoint.name, "") for endpoint in endpoints})
        return float(report.num_bytes)

    def _write_and_fetch(self, weight_version: int, versions: Versions) -> float:
        """The ranks write a version, unless they have; then every server that is up fetches it, whatever it has by now.

        What turns out to be torn is written once more, whole.
        """
        servers = self.rollout.servers
        order = Order(
            versions.store,
            weight_version,
            not self.rollout.keeps_kv,
            versions.in_place,
            self.sending.timeout_s,
            versions.all_files,
        )
        if self._written != weight_version:
            self._written_bytes = 0
        for is_last in (False, True):
            if self._written != weight_version:
                self._written_bytes += self._ask_ranks(weight_version, []).num_bytes
                self._written = weight_version
            fetched = servers.fetch(order)
            torn = next((each.trouble for each in fetched.values() if each.torn), "")
            if is_last or not torn:
                break
            log.warning("weight version %d is written again, whole: %s", weight_version, torn)
            self._written = None
        self._settle({endpoint: each.trouble for endpoint, each in fetched.items()})
        return float(self._written_bytes)  # also where it had been written for servers that are gone

    def _settle(self, troubles: Mapping[ServerEndpoint, str]) -> None:
        """Who has the weights, and who leaves the pool. troubles: why a server has not, or nothing."""
        servers = self.rollout.servers
        servers.received([endpoint for endpoint, trouble in troubles.items() if not trouble])
        for endpoint, trouble in troubles.items():
            if trouble:
                servers.drop(endpoint, f"It failed the weight sync: {trouble}")

    def _ask_ranks(self, weight_version: int, endpoints: Sequence[ServerEndpoint]) -> SyncReport:
        keep_kv = self.rollout.keeps_kv
        reports: list[SyncReport | None] = self.ranks.ask(
            lambda worker, _: worker.handle.send_weights.remote(
                self.role, weight_version, endpoints, self.sending, keep_kv
            ),
            "sync",
            self.role,
            # Rank 0 gives up one attempt after this time, and waits a little for who is to blame; a broadcast may need another
            # where a server failed.
            (self.sending.timeout_s + BLAME_S) * (ATTEMPTS if self.sending.transport == "broadcast" else 1),
        ).wait()
        report = reports[0]
        if report is None:
            raise SyncError(f"Rank 0 sent nothing for weight version {weight_version}.")
        return report

    def _compare_hashes(self, weight_version: int) -> dict[str, float]:
        """Hold every tensor of every server to the trainer's. Servers that give no hashes leave the pool. Raises SyncError."""
        servers, deadline_s = self.rollout.servers, self.recipe.deadlines.sync_s
        endpoints = [server.endpoint for server in servers.holding()]
        if not endpoints:
            return {}
        report: HashReport | None = self.ranks.ask(
            lambda worker, _: worker.handle.compare_hashes.remote(
                self.role, endpoints, self.recipe.model.dtype, self.sending, deadline_s
            ),
            "sync",
            self.role,
            2 * deadline_s,
        ).wait()[0]
        if report is None:
            raise SyncError(f"Rank 0 compared no hashes of weight version {weight_version}.")
        refuse(report.wrong, weight_version)
        for endpoint in endpoints:
            if endpoint.name in report.failed:
                servers.drop(endpoint, f"It gave no hashes of its weights: {report.failed[endpoint.name]}")
        return {"sync/hashed_tensors": float(report.num_tensors)}

    def verify(self, weight_version: int) -> dict[str, float]:
        """Prove, on a few sequences, that every server holds the trainer's weights. Raises SyncError with the numbers.

        A collector asks them; where it dies, the one in its place does.
        """
        return self.rollout.collectors.asked(lambda: self._verify(weight_version))

    def _verify(self, weight_version: int) -> dict[str, float]:
        plan, block = self.rollout.probe()
        column = self.ranks.ask_columns(
            lambda worker, _: worker.handle.logprobs.options(num_returns=2).remote(
                self.role, UNSCALED, "all", 1, plan, block
            ),
            self.layout,
            1,
            "sync",
            self.role,
            self.recipe.deadlines.sync_s,
        ).wait()[0][0]
        usual = FP8_TOLERANCE if self.sending.quantized else TOLERANCES[self.recipe.model.dtype]
        tolerance = self.recipe.sync.tolerance or usual
        return {"sync/probe_diff_max": self.rollout.verify(column, tolerance, weight_version)}
