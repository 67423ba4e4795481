"""A sync's plan for people and for programs: tables on the terminal, and plain values."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from itertools import islice
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from megarl.placement.cluster import Cluster
from megarl.sync.plan import SyncPlan
from megarl.sync.price import Price, price
from megarl.sync.sending import MIB

ROWS, SENDERS = 20, 16
_GB = 1e9
_HOW = {
    "broadcast": "broadcast; every stage and expert-parallel rank sends its own",
    "shared_memory": "shared memory; every device's rank hands over to the server beside it",
    "disk": "disk; every sender writes its own files",
}


def render(plan: SyncPlan, cluster: Cluster, *, quantized: bool = False) -> Group:
    """Senders with their bytes, seconds beside the bound, and the first rows of the table. quantized: as `price` takes it."""
    found, largest = price(plan, cluster, quantized=quantized), max(bucket.nbytes for bucket in plan.buckets)
    head = Text(
        f"Weight sync by {_HOW[plan.transport]}{'; in FP8, which senders make of these bytes' if quantized else ''}.\n"
        f"{plan.nbytes / _GB:.4g} GB in {plan.num_tensors:,} tensors and {len(plan.buckets):,} buckets of at most "
        f"{largest / MIB:,.0f} MiB, to {len(plan.receivers)} server{'s' if len(plan.receivers) > 1 else ''}; actor "
        f"{plan.trainer.layout} on {plan.trainer.layout.world_size} devices\n"
        f"{words(found)} (predicted)"
    )
    return Group(head, _senders(plan), _rows(plan))


def words(found: Price) -> str:
    """Seconds beside their bound, in one line."""
    return (
        f"{found.seconds:.3g} s; bound {found.bound_s:.3g} s, ratio {found.ratio:.2f}; beside it {found.engine_s:.2g} s of the "
        "engine, which loads one tensor after another"
    )


def _senders(plan: SyncPlan) -> Table:
    table = Table(title="Senders", title_justify="left")
    for column in ("rank", "node", "GB", "buckets", "helped by"):
        table.add_column(column, justify="right")
    counts = Counter(sender for bucket in plan.buckets for sender in plan.assemblers(bucket))
    for sender, nbytes in islice(plan.sent_bytes.items(), SENDERS):
        helpers = f"{len(plan.helpers(sender))} ranks" if plan.transport == "broadcast" else ""
        table.add_row(
            str(sender), str(plan.trainer.nodes[sender]), f"{nbytes / _GB:.4g}", f"{counts[sender]:,}", helpers
        )
    if len(counts) > SENDERS:
        table.add_row(f"and {len(counts) - SENDERS} more", "", "", "", "")
    return table


def _rows(plan: SyncPlan) -> Table:
    table = Table(title=f"The first {ROWS} rows; all of them with --json", title_justify="left")
    for column in ("bucket", "tensor", "part", "of rank", "bytes", "sent by", "to"):
        table.add_column(column, justify="left" if column in ("tensor", "to") else "right")
    for row in islice(plan.rows(), ROWS):
        to = row.receivers[0] if len(row.receivers) == 1 else f"all {len(row.receivers)} servers"
        cells = (row.bucket, row.tensor, row.part, row.rank, f"{row.nbytes:,}", row.sender, to)
        table.add_row(*map(str, cells))
    return table


def as_json(plan: SyncPlan, cluster: Cluster, *, quantized: bool = False) -> dict[str, Any]:
    """The whole plan as plain values. quantized: as `price` takes it."""
    found = price(plan, cluster, quantized=quantized)
    return {
        "transport": plan.transport,
        "quantized": quantized,
        "bytes": plan.nbytes,
        "tensors": plan.num_tensors,
        "buckets": len(plan.buckets),
        "bucket_bytes": plan.bucket_bytes,
        "predicted": {**asdict(found), "ratio": found.ratio},
        "senders": [
            {"rank": rank, "node": plan.trainer.nodes[rank], "bytes": nbytes, "helpers": list(plan.helpers(rank))}
            for rank, nbytes in plan.sent_bytes.items()
        ],
        "receivers": [asdict(receiver) for receiver in plan.receivers],
        "rows": [list(vars(row).values())[:-1] for row in plan.rows()],
        "columns": ["bucket", "tensor", "part", "rank", "bytes", "sender"],
    }
