"""The parent of two servers and a router, to be killed: says where they are, then waits for the end of its input."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from megarl.core import janitor
from megarl.serving.process import process_tree
from tests.support.platforms import chosen
from tests.support.served import serving


def main() -> None:
    folder = Path(sys.argv[1])
    with serving(folder, chosen(), num_servers=2) as pool:
        everything = [*pool.servers, pool.router]
        janitor.register_segments(folder / "registry", [name for one in everything for name in one.shm_names()])
        facts = {
            "pids": [one.pid for one in everything],
            "trees": [process_tree(one.pid) for one in everything],
            "urls": [one.url for one in everything],
            "segments": [sorted(one.shm_names()) for one in everything],
            "model": str(pool.model),
            "run_id": os.environ[janitor.RUN_ID_VARIABLE],
        }
        print(json.dumps(facts), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
