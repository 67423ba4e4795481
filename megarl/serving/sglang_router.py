"""`python -m megarl.serving.sglang_router <flags of sglang_router.launch_router>`: the router.

The API key comes on standard input. It is asked of every request, and sent to servers that are named at start. Servers
added later bring their own.
"""

from __future__ import annotations

import sys

from megarl.serving.launcher import read_api_key


def main() -> None:
    """Serve until told to stop."""
    from sglang_router.launch_router import launch_router, parse_router_args

    api_key = read_api_key()
    settings = parse_router_args(sys.argv[1:])
    settings.api_key = api_key
    launch_router(settings)


if __name__ == "__main__":
    main()
