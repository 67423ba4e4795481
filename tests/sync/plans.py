"""Random trainers and servers for the properties of sync plans."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

from hypothesis import strategies as st

from megarl.core.layout import Layout
from megarl.models.config import Mla, Moe
from megarl.sync.plan import Receiver, SyncPlan, Trainer, Transport, plan_sync
from megarl.sync.senders import MOST_SENDERS
from tests.models.configs import PLAIN, cases

LATENT = replace(PLAIN, hidden_size=8, mla=Mla(4, 6, 1, 2, 1), num_heads=4, num_kv_heads=4, head_dim=3, vocab_size=16)
EXPERTS = replace(
    PLAIN, hidden_size=8, ffn_hidden_size=16, moe=Moe(4, 1, 8), moe_layers=frozenset({0, 1}), vocab_size=32
)


@st.composite
def trainers(draw: st.DrawFn) -> Trainer:
    """A model, a layout with every axis, and nodes of 1 to 8 ranks."""
    config, layout = draw(cases())
    cp, dp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    layout = replace(layout, cp=cp, world_size=layout.world_size * cp * dp)
    node = draw(st.sampled_from([1, 2, 3, 8]))
    nodes = tuple(rank // node for rank in range(layout.world_size))
    spec = draw(st.sampled_from(["torch", "transformer_engine"]))
    return Trainer(config, layout, nodes, draw(st.sampled_from([2, 4])), spec)


@st.composite
def plans(draw: st.DrawFn, transports: tuple[Transport, ...] = ("broadcast", "shared_memory", "disk")) -> SyncPlan:
    """A plan of up to three servers: beside ranks for shared memory, on nodes behind the trainer's else."""
    trainer, transport = draw(trainers()), draw(st.sampled_from(transports))
    world, count, tp = trainer.layout.world_size, draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    if transport == "shared_memory":
        tp = max(takewhile(lambda size: size <= world, (1, 2, 4)))
        firsts = [index % (world // tp) * tp for index in range(count)]
        beside = [tuple(range(first, first + tp)) for first in firsts]
        receivers = [
            Receiver(f"server {index}", tuple(trainer.nodes[rank] for rank in ranks), ranks)
            for index, ranks in enumerate(beside)
        ]
    else:
        first = max(trainer.nodes) + 1
        receivers = [
            Receiver(f"server {i}", tuple(first + (i * tp + device) // 4 for device in range(tp))) for i in range(count)
        ]
    most = draw(st.sampled_from([1, 2, MOST_SENDERS]))
    return plan_sync(
        trainer, tuple(receivers), transport, draw(st.sampled_from([1, 64, 400, 10**6])), most_senders=most
    )


def dense(layout: Layout, transport: Transport = "broadcast", bucket_bytes: int = 64) -> SyncPlan:
    """A plan of the plain model with ranks on one node and two servers of tp 2 on the next."""
    trainer = Trainer(replace(PLAIN, hidden_size=8, vocab_size=32), layout, (0,) * layout.world_size)
    receivers = Receiver("one", (1, 1)), Receiver("two", (1, 1))
    return plan_sync(trainer, receivers, transport, bucket_bytes)
