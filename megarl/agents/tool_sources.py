"""Where a recipe's tools come from: functions, the sandboxed Python that comes with megarl, and MCP servers."""

from __future__ import annotations

import sys

from megarl.agents.mcp_server import open_servers
from megarl.agents.python_sandbox import ToolSandboxes
from megarl.agents.tools import AnyTool, Holder, Tool, Toolbox, open_tools
from megarl.core.errors import UserError
from megarl.recipe.agent import PYTHON, Agent
from megarl.sandbox.python_tool import PythonTool


def open_toolbox(agent: Agent) -> Toolbox:
    """All tools that a recipe names. What they hold starts with their first call; MCP servers are asked for their tools.

    Raises UserError: as `open_tools` and `open_servers` do, and for a name that two tools have.
    """
    tools: list[AnyTool] = [*open_tools([path for path in agent.tools if path != PYTHON])]
    held: list[Holder] = []
    if PYTHON in agent.tools:
        sandboxes = ToolSandboxes(agent.tool_timeout_s)
        # What the recipe bounds is cut once, with the results of all tools.
        python = PythonTool(sandboxes) if agent.tool_result_characters is None else PythonTool(sandboxes, sys.maxsize)
        tools.append(Tool(python.python, timed=True))
        held.append(sandboxes)
    for server, served in open_servers(agent.mcp):
        tools += served
        held.append(server)
    _check_names(tools)
    return Toolbox(
        tools,
        agent.tool_timeout_s,
        held,
        max_calls=agent.max_calls,
        most_characters=agent.tool_result_characters,
    )


def _check_names(tools: list[AnyTool]) -> None:
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise UserError(f"agent.tools, agent.mcp: two tools have the name {tool.name!r}, and calls go by name.")
        seen.add(tool.name)
