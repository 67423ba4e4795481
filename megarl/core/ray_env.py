"""Environment variables between whoever starts a Ray over several nodes and the run that joins it.

Ray itself is megarl/cluster's; job scripts and node starters need only these names.
"""

from __future__ import annotations

import os

# host:port of a Ray that runs. A run joins it instead of starting its own. RAY_AUTH_MODE and RAY_AUTH_TOKEN go with it.
RAY_ADDRESS_VARIABLE = "MEGARL_RAY_ADDRESS"

# On how many nodes that Ray is, spares included. The run predicts its memory for as many; nothing where nobody says so.
RAY_NODES_VARIABLE = "MEGARL_RAY_NODES"

# For `ray start` on every node: one that cannot be reached is given up after some 20 seconds, not 64.
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}

# For who starts a Ray: how many calls its GCS remembers for the dashboard. Its own 100,000 grow for thousands of steps.
FEW_EVENTS = {"RAY_task_events_max_num_task_in_gcs": "1000"}


def nodes_of_ray() -> int | None:
    """How many nodes the Ray has that a run joins; None where nobody says so."""
    said = os.environ.get(RAY_NODES_VARIABLE, "")
    return int(said) if said.isdigit() else None
