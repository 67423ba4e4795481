"""An MCP server as others write them, and nothing of megarl: sells fruit.

    python mcp_shop.py PIDS [PORT]

Appends its process id to the file PIDS. With a port it listens there, else it speaks on its standard input and output.
"""

import os
import sys
import time

from mcp.server import MCPServer

with open(sys.argv[1], "a") as pids:
    pids.write(f"{os.getpid()}\n")
shop = MCPServer("shop", log_level="CRITICAL")


@shop.tool()
def price_of(fruit: str, count: int = 1) -> float:
    """What so many pieces of a fruit cost."""
    return {"apple": 3.0, "pear": 2.5}[fruit] * count


@shop.tool()
def close_down() -> str:
    """End this server, in the middle of a call."""
    os._exit(3)


@shop.tool()
def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "waited"


if len(sys.argv) > 2:
    shop.run("streamable-http", port=int(sys.argv[2]))
else:
    shop.run("stdio")
