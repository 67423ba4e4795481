"""Whether the starts of a job come further: one that loses nodes at every start is not queued for ever."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from megarl.core.json_file import whole_lines

MOST_VAIN = 3  # starts in a row without a further step, after which the job ends


def reached(metrics: Path) -> int:
    """The last step of a run by its metrics.jsonl; 0 where it has none."""
    steps = (line.get("step") for line in whole_lines(metrics))
    return max((step for step in steps if isinstance(step, int)), default=0)


def vain_starts(events: Path, job: str, step: int) -> int:
    """How many of a job's last starts came no further. events: of all jobs of the run. step: that it has reached by now.

    One that was asked to stop, for others or because of its time limit, says nothing of the nodes, and is left out. A start may
    find fewer steps than the one before: those after the checkpoint are made again.
    """
    mine = [line for line in whole_lines(events) if line.get("job") == job and {"restart", "event"} <= line.keys()]
    asked = {line["restart"] for line in mine if line["event"] == "requeued" and not line.get("lost")}
    starts = [line for line in mine if line["event"] == "started"]
    best = [*accumulate((line.get("reached", 0) for line in starts), max)]
    return sum(
        start["restart"] not in asked and furthest >= max(best[-1], step)
        for start, furthest in zip(starts, best, strict=True)
    )
