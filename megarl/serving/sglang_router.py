"""`python -m megarl.serving.sglang_router <flags of sglang_router.launch_router>`: the router.

The API key comes on standard input. It is asked of every request, and sent to servers that are named at start. Servers
added later bring their own.
"""

from __future__ import annotations

import argparse
import sys

from megarl.serving.launcher import read_api_key


def main() -> None:
    """Serve until told to stop. As sglang_router.launch_router does it, which loads all of torch for a router of its own."""
    import setproctitle
    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    api_key = read_api_key()
    parser = argparse.ArgumentParser(prog="sglang_router")
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    settings = RouterArgs.from_cli_args(parser.parse_args(sys.argv[1:]), use_router_prefix=False)
    settings.api_key = api_key
    setproctitle.setproctitle("sglang::router")
    Router.from_args(settings).start()


if __name__ == "__main__":
    main()
