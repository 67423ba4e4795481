"""Ray: processes, placements, waits with deadlines. The only room that imports ray, beside its job client in launch/.

Ray reads how it authenticates when it is first imported, so this package decides it before any of its modules imports ray:
a secret of this process's own, which Ray's processes inherit. A token that is already in the environment is kept.
"""

import os
import secrets
import sys

from megarl.core.errors import MegarlError
from megarl.core.ray_env import FEW_EVENTS

if "ray" in sys.modules and "RAY_AUTH_MODE" not in os.environ:
    raise MegarlError(
        "ray was imported before megarl.cluster, and has decided without a secret: import megarl.cluster first."
    )

os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
# Ray would otherwise report usage over the network.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ |= {name: value for name, value in FEW_EVENTS.items() if name not in os.environ}
