"""Dealing samples to ranks: the heaviest rank and the micro-batches against their lower bounds, and the time it takes.

    python -m bench.balance

16,384 samples of log-normal length (sigma 1, at most 16,384 tokens) over 128 data-parallel ranks, as one mini-batch; the
median and the worst of ten draws. No rank can have less than the mean, nor than the longest sample; and each rank runs as many
micro-batches as the fullest, which are no fewer than its tokens need. Padding is what the packed step computes beyond its
samples: fillers of one token where a rank has fewer micro-batches than the others. Seconds are of one thread.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.support.measure import no_options, write
from megarl.data.deal import deal

SAMPLES, RANKS, LONGEST, DRAWS = 16384, 128, 16384, 10
BUDGETS = (16384, 32768)
MEANS = (1000.0, 4000.0)
LIMITS = {"heaviest": 1.01, "padding": 1.01, "seconds": 0.1}


def draw(mean: float, seed: int) -> list[int]:
    lengths = np.random.default_rng(seed).lognormal(np.log(mean) - 0.5, 1.0, SAMPLES)
    return [int(length) for length in lengths.clip(1, LONGEST)]


def measure(lengths: list[int], budget: int) -> dict[str, float]:
    began = time.perf_counter()
    shards = deal(lengths, RANKS, budget)
    seconds = time.perf_counter() - began
    assert sorted(item for bins in shards for part in bins for item in part) == list(range(SAMPLES))
    assert all(sum(lengths[item] for item in part) <= budget for bins in shards for part in bins)
    loads = [sum(lengths[item] for part in bins for item in part) for bins in shards]
    bound = max(-(-sum(lengths) // RANKS), *lengths)
    fillers = sum(not part for bins in shards for part in bins)
    return {
        "heaviest": max(loads) / bound,
        "padding": (sum(lengths) + fillers) / sum(lengths),
        "micro_batches": len(shards[0]) / -(-bound // budget),
        "seconds": seconds,
    }


def main() -> None:
    rows: list[dict[str, Any]] = []
    table = Table(title=f"{SAMPLES:,} samples over {RANKS} ranks; over the lower bound, worst of {DRAWS}")
    for column in ("mean length", "budget", "heaviest rank", "tokens with fillers", "micro-batches", "ms, median"):
        table.add_column(column, justify="right")
    for mean in MEANS:
        for budget in BUDGETS:
            found = [measure(draw(mean, seed), budget) for seed in range(DRAWS)]
            row = {name: max(each[name] for each in found) for name in ("heaviest", "padding", "micro_batches")}
            row["seconds"] = statistics.median(each["seconds"] for each in found)
            rows.append({"mean": mean, "budget": budget, **row})
            ratios = (f"{row[name]:.4f}" for name in ("heaviest", "padding", "micro_batches"))
            table.add_row(f"{mean:.0f}", str(budget), *ratios, f"{1e3 * row['seconds']:.0f}")
    Console().print(table)
    write("balance", {"limits": LIMITS, "rows": rows}, None)
    sys.exit(0 if all(row[name] <= limit for row in rows for name, limit in LIMITS.items()) else 1)


if __name__ == "__main__":
    no_options(__doc__)
    main()
