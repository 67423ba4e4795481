"""An MCP server with a tool that takes few tokens to tell of."""

from __future__ import annotations

from mcp.server import MCPServer

server = MCPServer("small", log_level="CRITICAL")


@server.tool(structured_output=False)
def see() -> str:
    """Look."""
    return "seen"


if __name__ == "__main__":
    server.run("stdio")
