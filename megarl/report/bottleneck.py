"""Which side of a run waited for the other, in a sentence, and which key would help. Made of a run's history alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megarl.report.history import Row

# A side that waits for less than this share of its time is at work: syncs and checkpoints alone take some.
LITTLE = 0.1


class Shares(NamedTuple):
    """Fractions of the steps' seconds. waiting: the ranks waited for samples. idle: the servers had no request."""

    waiting: float
    idle: float
    overlap: bool  # whether samples of older weights were trained on


def shares(rows: Sequence[Row]) -> Shares | None:
    """Over all steps but the first, which nothing can overlap; None where no step has samples of its own."""
    steps = [row for row in rows if row.get("perf/step_s") and row.get("perf/servers_idle") is not None]
    steps = steps[1:] or steps
    if not steps:
        return None
    seconds = sum(row["perf/step_s"] for row in steps)
    waiting = sum(row.get("perf/rollout_s") or 0.0 for row in steps) / seconds
    idle = sum(row["perf/servers_idle"] * row["perf/step_s"] for row in steps) / seconds
    return Shares(waiting, idle, any(row.get("rollout/staleness_max") for row in steps))


def bottleneck(rows: Sequence[Row]) -> str:
    """A line for the end of a run; empty where it generated nothing."""
    found = shares(rows)
    if found is None:
        return ""
    return f"ranks waited for samples {found.waiting:.0%} of the time, servers were idle {found.idle:.0%}: {_advice(found)}"


def _advice(found: Shares) -> str:
    ranks_wait, servers_wait = found.waiting > LITTLE, found.idle > LITTLE
    if ranks_wait and servers_wait:
        if found.overlap:
            return (
                "they wait for each other. What would help: a higher rollout.max_staleness, or rollout.oversample where "
                "servers are on the ranks' devices"
            )
        return (
            "they take turns. What would help: rollout.max_staleness: 1 where servers have devices of their own, with "
            "rollout.oversample: 1.25 where they share the ranks'"
        )
    if ranks_wait:
        return "generation is the bottleneck. What would help: more servers (rollout.servers)"
    if servers_wait:
        return "training is the bottleneck. What would help: more ranks (cluster.devices), or fewer servers"
    return "both sides are at work"
