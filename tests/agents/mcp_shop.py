"""An MCP server as others write them, and nothing of megarl: sells fruit.

    python mcp_shop.py PIDS [PORT]

Appends its process id to the file PIDS. With a port it listens there, else it speaks on its standard input and output.
"""

import base64
import os
import sys
import time

from mcp.server import MCPServer
from mcp_types import EmbeddedResource, ImageContent, TextContent, TextResourceContents

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


@shop.tool()
def leaflet(fruit: str) -> list[TextContent | ImageContent | EmbeddedResource]:
    """Of a fruit, as a resource; nothing of a kiwi; of a plum with a picture."""
    if fruit == "plum":
        picture = ImageContent(type="image", data=base64.b64encode(b"of a plum").decode(), mime_type="image/png")
        return [TextContent(type="text", text="a plum:"), picture]
    if fruit == "kiwi":
        return [TextContent(type="text", text="")]
    page = TextResourceContents(uri=f"shop://{fruit}", text=f"{fruit}s are fresh")
    return [EmbeddedResource(type="resource", resource=page)]


if len(sys.argv) > 2:
    shop.run("streamable-http", port=int(sys.argv[2]))
else:
    shop.run("stdio")
