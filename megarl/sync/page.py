"""The table of docs/weight_sync.md: what plans of known models take by the table of devices.

python -m megarl.sync.page docs/weight_sync.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megarl.core.layout import Layout
from megarl.models.known_configs import FOLDER
from megarl.placement.cluster import Cluster, make_cluster
from megarl.placement.weight_sync import between_bytes_s
from megarl.placement.workload import read_model
from megarl.sync.places import servers_apart, servers_beside, trainer_on
from megarl.sync.plan import SyncPlan, plan_sync, planned_bytes
from megarl.sync.price import Price, price
from megarl.sync.ring import bucket_limit
from megarl.sync.sending import MIB

BUCKET_BYTES = 512 * MIB
_GB = 1e9


@dataclass(frozen=True)
class Case:
    """A model on devices. split: servers on devices of their own, as many as the trainer has."""

    model: str
    device: str
    layout: Layout
    servers: int
    tp: int
    split: bool = False

    @property
    def cluster(self) -> Cluster:
        """As many nodes as it takes."""
        device = make_cluster(self.device, 1)
        devices = self.layout.world_size + (self.servers * self.tp if self.split else 0)
        return device.of_nodes(-(-devices // device.devices_per_node))

    def plan(self) -> SyncPlan:
        """Its plan."""
        per_node = self.cluster.devices_per_node
        trainer = trainer_on(read_model(FOLDER / self.model), self.layout, per_node)
        if self.split:
            apart = servers_apart(self.servers, self.tp, per_node, self.layout.world_size)
            return plan_sync(trainer, apart, "broadcast", planned_bytes(BUCKET_BYTES, trainer.layout))
        beside = servers_beside(self.servers, self.tp, trainer, per_node=per_node)
        return plan_sync(trainer, beside, "shared_memory", bucket_limit(BUCKET_BYTES))


LLAMA_8B, LLAMA_70B = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"
QWEN_30B, DEEPSEEK = "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3"
CASES = (
    Case(LLAMA_8B, "H100", Layout(world_size=8), 8, 1),
    Case(LLAMA_8B, "H100", Layout(tp=2, world_size=8), 8, 1),
    Case(LLAMA_8B, "H100", Layout(tp=2, pp=2, world_size=8), 4, 2),
    Case(LLAMA_8B, "H100", Layout(tp=8, world_size=8), 1, 8),
    Case(QWEN_30B, "H200", Layout(tp=2, ep=8, world_size=8), 4, 2),
    Case(LLAMA_70B, "H100", Layout(tp=8, pp=4, world_size=64), 16, 4, split=True),
    Case(LLAMA_70B, "H100", Layout(tp=4, world_size=64), 8, 8, split=True),
    Case(
        DEEPSEEK,
        "H100",
        Layout(tp=4, pp=8, ep=32, first_stage_layers=7, last_stage_layers=6, world_size=256),
        8,
        32,
        split=True,
    ),
)

BEGIN, END = "<!-- megarl.sync.page -->\n", "<!-- end -->\n"


@dataclass(frozen=True)
class Priced:
    """A case with its plan and what that takes."""

    case: Case
    plan: SyncPlan
    price: Price


def priced() -> tuple[Priced, ...]:
    """All cases; takes seconds."""
    plans = ((case, case.plan()) for case in CASES)
    return tuple(Priced(case, plan, price(plan, case.cluster)) for case, plan in plans)


def updated(page: str, found: Iterable[Priced]) -> str:
    """The page with the table made anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, behind = rest.partition(END)
    assert behind, f"the page lacks {BEGIN!r} or {END!r}"
    return before + BEGIN + "\n".join(_table(found)) + "\n" + END + behind


def _table(found: Iterable[Priced]) -> Iterator[str]:
    yield "| model | GB | trainer | servers | senders, GB each | buckets | seconds | bound | ratio | one card, s | engine, s |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for each in found:
        yield _line(each.case, each.plan, each.price)


def _line(case: Case, plan: SyncPlan, found: Price) -> str:
    sent = sorted(plan.sent_bytes.values())
    where = f"{case.layout.world_size} {case.device}, {case.layout}"
    if case.split:
        senders = f"{len(sent)}, {sent[0] / _GB:.3g} to {sent[-1] / _GB:.3g}"
        card = f"{plan.nbytes / between_bytes_s(case.cluster):.3g}"
    else:
        senders, card = f"each of {len(sent)}, all", ""
    place = "on others" if case.split else "on the same"
    cells = (
        case.model.rpartition("/")[2],
        f"{plan.nbytes / _GB:,.0f}",
        where,
        f"{case.servers} of tp{case.tp}, {place}",
        senders,
        f"{len(plan.buckets):,}",
        f"{found.seconds:.3g}",
        f"{found.bound_s:.3g}",
        f"{found.ratio:.2f}",
        card,
        f"{found.engine_s:.2g}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(updated(file.read_text(), priced()))
