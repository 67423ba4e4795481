"""Environment variables between whoever starts a Ray over several nodes and the run that joins it.

Ray itself is megarl/cluster's; job scripts and node starters need only these names.
"""

from __future__ import annotations

import json
import os
from typing import NamedTuple

from megarl.core.errors import UserError

# host:port of a Ray that runs. A run joins it instead of starting its own. RAY_AUTH_MODE and RAY_AUTH_TOKEN go with it.
RAY_ADDRESS_VARIABLE = "MEGARL_RAY_ADDRESS"

# On how many nodes that Ray is, spares included. The run predicts its memory for as many; nothing where nobody says so.
RAY_NODES_VARIABLE = "MEGARL_RAY_NODES"

# Set where a scheduler has started the run before: it goes on by itself, and nobody is there to read why it would not.
AGAIN_VARIABLE = "MEGARL_STARTED_AGAIN"

# Ray's own (2.60), in the command of a Ray job alone: what the job's workers start with, as JSON, and host:port of its Ray.
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
JOB_ADDRESS_VARIABLE = "RAY_ADDRESS"

# Ray's own, for whoever joins it from the command of a job: what both set, as a variable of the workers, is what joins says. Ray
# would refuse it otherwise, also where both say the same.
OVERRIDE_VARIABLE = "RAY_OVERRIDE_JOB_RUNTIME_ENV"

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


def started_again() -> bool:
    """Whether a scheduler has started this run before."""
    return bool(os.environ.get(AGAIN_VARIABLE))


def without_ray() -> dict[str, str]:
    """This process's environment without what opens the run's own Ray: for a user's programs."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


class RunningRay(NamedTuple):
    """A Ray that a run joins. address: host:port. variable: which one of the environment says so."""

    address: str
    variable: str


def ray_to_join() -> RunningRay | None:
    """The Ray that a run of this process joins: the one that is named, else that of the Ray job which this process is.

    None where it starts one of its own. Raises UserError for a name that is empty.
    """
    named = os.environ.get(RAY_ADDRESS_VARIABLE)
    if named == "":
        raise UserError(
            f"{RAY_ADDRESS_VARIABLE} is set, and empty: it has to be host:port of a Ray that runs. Perhaps it was made of a "
            "variable that is not set where the command is put together. Unset it: in a Ray job a run joins the job's Ray, and "
            "elsewhere it starts one of its own."
        )
    if named is not None:
        return RunningRay(named, RAY_ADDRESS_VARIABLE)
    address = os.environ.get(JOB_ADDRESS_VARIABLE) if JOB_VARIABLE in os.environ else None
    return RunningRay(address, JOB_ADDRESS_VARIABLE) if address else None


def is_for_driver_alone(variable: str) -> bool:
    """Whether a Ray job has given this variable to its command, which uses no device, and not to its workers."""
    job = os.environ.get(JOB_VARIABLE)
    if job is None:
        return False
    settings = json.loads(job).get("runtime_env") or {}
    return variable not in (settings.get("env_vars") or {})
