"""The placement search: how long it takes. One command:

    python -m bench.plan

PPO with five 7B roles, tables and search together, in a process with one thread; medians of five. On a busy
machine cpu_s, the processor time, is the fairer of the two. Whether it finds the right ones: `bench/hybridflow.py`,
`bench/plan_published.py`, `bench/plan_vs_measured.py`.
"""

from __future__ import annotations

import resource
import statistics
import time
from dataclasses import replace

from bench.support.hybridflow import COLOCATE, Finding
from bench.support.measure import no_options, write
from megarl.placement.cluster import Cluster, make_cluster
from megarl.placement.search import Result, search
from megarl.placement.tables import build_tables
from megarl.placement.workload import Workload

LIMITS_S = {16: 0.2, 128: 0.2, 1024: 2.0, 16384: 20.0}


# The step is that of HybridFlow's experiments, with the actor's own log-probs.
STEP = replace(Finding("7B", "7B", 16, COLOCATE).workload((2048, 4096, 8192, 16384)), scores="all")


def look(work: Workload, cluster: Cluster) -> Result:
    tables = build_tables(work, cluster).searched(asynchronous=False)
    return search(tables, devices=cluster.num_devices, usable=cluster.usable_bytes)


def main() -> None:
    lines = []
    for devices, limit in LIMITS_S.items():
        seconds, busy = [], []
        for _ in range(5):
            start, start_busy = time.perf_counter(), time.process_time()
            look(STEP, make_cluster("A100-80", devices // 8))
            seconds.append(time.perf_counter() - start)
            busy.append(time.process_time() - start_busy)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        line = {"devices": devices, "seconds": statistics.median(seconds), "cpu_s": statistics.median(busy)}
        lines.append({**line, "limit_s": limit, "peak_mib": peak})
        print({name: round(value, 3) for name, value in lines[-1].items()}, flush=True)
    write("plan", {"speed": lines}, None)


if __name__ == "__main__":
    no_options(__doc__)
    main()
