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
        """Of the weights as they are now, and the plan of it; collective as `PlannedWeights` is. helped: as `plan_sync` says."""
        trainer = trainer_of(gatherer, self._nodes)
        size = planned_bytes(bucket_bytes, trainer.layout, quantized=self._quantized)
        made = self._plan
        if made is None or (made.trainer, made.bucket_bytes, made.helped) != (trainer, size, helped):
            self._plan = made = plan_sync(trainer, (), transport, size, helped=helped)
        weights = PlannedWeights(gatherer, made, self._rank, self.peers)
        return QuantizedWeights(weights, gatherer.config) if self._quantized else weights, made
