"""Stands in for `megarl train` where only the job around it is looked at: a driver that does what its folder says.

python slurm_driver.py FOLDER: writes what it sees of its Ray to FOLDER/seen-RESTART.json, and waits at its first start for the
request to stop: then it ends with the exit code in FOLDER/code, or, where there is none, stops as a run does. At its second start
it ends well.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import ray

STOPPED = 75


def main() -> int:
    folder = Path(sys.argv[1])
    restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    ray.init(address=os.environ["MEGARL_RAY_ADDRESS"], log_to_driver=False)
    seen = {
        "nodes": sorted(node["NodeName"] for node in ray.nodes()),
        "session": ray._private.worker.global_worker.node.session_name,
        "token": os.environ["RAY_AUTH_TOKEN"],
    }
    partial = folder / f".seen-{restart}.json"
    partial.write_text(json.dumps(seen))
    partial.rename(folder / f"seen-{restart}.json")
    if restart > 0:
        return 0
    signal.sigwait([signal.SIGUSR1])
    code = folder / "code"
    return int(code.read_text()) if code.exists() else STOPPED


if __name__ == "__main__":
    sys.exit(main())
