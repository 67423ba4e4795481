"""What a rank sends or writes of its model, sync after sync: the plan, which is made once, and the memory that ranks share."""

from __future__ import annotations

from megarl.models.hf_gather import Gatherer
from megarl.sync.outgoing import Outgoing, PlannedWeights, trainer_of
from megarl.sync.peer_memory import PeerMemory
from megarl.sync.plan import SyncPlan, Transport, plan_sync, planned_bytes
from megarl.sync.quantized import QuantizedWeights


class Planned:
    """nodes: of every rank. peers: memory of senders that ranks of their nodes write into. quantized: linears go in FP8."""

    def __init__(self, nodes: tuple[int, ...], rank: int, peers: PeerMemory, *, quantized: bool = False) -> None:
        self.peers = peers
        self._nodes, self._rank, self._quantized = nodes, rank, quantized
        self._plan: SyncPlan | None = None

    def outgoing(
        self, gatherer: Gatherer, transport: Transport, bucket_bytes: int, *, helped: bool
    ) -> tuple[Outgoing, SyncPlan]:
        """Of the weights as they are now, and the plan of it. The rest as `PlannedWeights` takes it; collective as it is."""
        trainer = trainer_of(gatherer, self._nodes)
        size = planned_bytes(bucket_bytes, trainer.layout, quantized=self._quantized)
        if self._plan is None or (self._plan.trainer, self._plan.bucket_bytes) != (trainer, size):
            self._plan = plan_sync(trainer, (), transport, size)
        weights = PlannedWeights(gatherer, self._plan, self._rank, self.peers, helped=helped)
        return QuantizedWeights(weights, gatherer.config) if self._quantized else weights, self._plan
