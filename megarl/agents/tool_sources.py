"""Where a recipe's tools come from: functions, the sandboxed Python that comes with megarl, MCP servers, and environments."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.agents.environment_tools import EnvironmentTools
from megarl.agents.mcp_server import open_servers
from megarl.agents.python_sandbox import ToolSandboxes
from megarl.agents.tools import AnyTool, Holder, Tool, Toolbox, open_tools
from megarl.core.errors import UserError
from megarl.recipe.agent import PYTHON, Agent
from megarl.sandbox.python_tool import PythonTool


@dataclass(frozen=True)
class SharedTools:
    """Tools that are no environment's, and what they hold."""

    tools: Sequence[AnyTool]
    held: Sequence[Holder]


def open_toolbox(agent: Agent, shared: SharedTools | None = None) -> Toolbox:
    """All tools that a recipe names. shared: those that are no environment's, where somebody else holds them.

    Raises UserError: as `open_shared` and EnvironmentTools do, and for a name that two tools have.
    """
    methods = EnvironmentTools(agent) if agent.environment_tools else None
    own = open_shared(agent) if shared is None else SharedTools(shared.tools, ())
    _check_names([*(tool.name for tool in own.tools), *([] if methods is None else methods.names)])
    return Toolbox(
        own.tools,
        agent.tool_timeout_s,
        own.held,
        max_calls=agent.max_calls,
        most_characters=agent.tool_result_characters,
        methods=methods,
    )


def open_shared(agent: Agent) -> SharedTools:
    """What they hold starts with their first call; MCP servers are asked for their tools.

    Raises UserError, as `open_tools` and `open_servers` do.
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
    return SharedTools(tools, held)


def _check_names(names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UserError(
                f"agent.tools, agent.mcp, agent.environment_tools: two tools have the name {name!r}, and calls go by name. "
                "Rename one, or remove it."
            )
        seen.add(name)
