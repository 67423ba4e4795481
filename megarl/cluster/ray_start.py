"""`python -m megarl.cluster.ray_start start ...`: Ray's own command on a node of a job, with no more processes than a run needs.

What is said of a run's own Ray in services.py holds for it, too. Not for a run on one machine, which starts its Ray itself.
"""

from __future__ import annotations

import sys

from megarl.cluster.services import ending_with_raylet, with_few_processes

if __name__ == "__main__":
    from ray.scripts.scripts import main

    with with_few_processes(), ending_with_raylet():
        sys.exit(main())
