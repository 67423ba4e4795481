"""Methods of the recipe's environment as tools: a call goes to the object of the episode that makes it.

Not for what a method may give (environment.py), nor for tools that know no episode (tools.py).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.agents.environment import Done, EnvironmentBrokenError, EnvironmentFailedError, ToolResult, check_result
from megarl.agents.environment_processes import RemoteEnvironment
from megarl.agents.loading import METHODS, REWARD, SHARE, environment_class
from megarl.agents.patience import within
from megarl.agents.tools import AnyTool, Signature, apart, as_given
from megarl.core.errors import UserError
from megarl.core.words import did_you_mean, with_article
from megarl.recipe.agent import Agent

KEY = "agent.environment_tools"
OWN = (*METHODS, REWARD, SHARE)  # that megarl calls


class EnvironmentTools:
    """Those that a recipe names. Raises UserError: no such method, or one that cannot be a tool."""

    def __init__(self, agent: Agent) -> None:
        assert agent.environment is not None
        found = environment_class(agent.environment)
        self._signatures = [_signature(found, name) for name in agent.environment_tools]
        self.schemas: list[dict[str, Any]] = [each.schema for each in self._signatures]
        self.names = [each.name for each in self._signatures]

    def of(self, environment: Any) -> Mapping[str, AnyTool]:
        """Tools of one episode, for one turn."""
        turn = _Turn(environment)
        return {each.name: _EpisodeTool(each, turn) for each in self._signatures}


@dataclass
class _Turn:
    """The calls of one turn go to the object one after another, in their order, until one has ended the episode."""

    environment: Any
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    ended: bool = False


class _EpisodeTool:
    """A method of one episode's environment. As of AnyTool."""

    def __init__(self, signature: Signature, turn: _Turn) -> None:
        self.name, self.schema = signature.name, signature.schema
        self._signature, self._turn = signature, turn

    async def call(self, arguments: str, seconds: float) -> ToolResult | Done:
        """What it gives. Raises EnvironmentBrokenError, and EnvironmentFailedError as Tool does."""
        values, turn = self._signature.read(arguments), self._turn
        async with turn.lock:  # waiting for the calls before it takes nothing of this one's deadline
            if turn.ended:
                raise EnvironmentFailedError("an earlier call of this turn has ended the episode")
            try:
                given = await within(lambda: _called(turn.environment, self.name, values), seconds, self.name)
                result = check_result(given, self.name)
            except EnvironmentBrokenError:
                turn.ended = True
                raise
            turn.ended = isinstance(result, Done)
            return result


async def _called(environment: Any, name: str, values: Mapping[str, Any]) -> Any:
    if isinstance(environment, RemoteEnvironment):
        return await environment.tool(name, values)
    return await apart(getattr(environment, name), values, as_given)


def _signature(found: type[Any], name: str) -> Signature:
    where = f"{KEY}: {name!r}"
    if name in OWN:
        raise UserError(f"{where}: megarl itself calls {', '.join(OWN)}, and no policy does. Name another method.")
    function = inspect.getattr_static(found, name, None)
    if function is None:
        public = [each for each in dir(found) if callable(getattr(found, each)) and each[0] != "_" and each not in OWN]
        hint = did_you_mean(name, public, quoted=True)
        raise UserError(f"{where}: {found.__name__} has no such method.{hint} It has: {', '.join(public) or 'none'}.")
    if not inspect.isfunction(function) or not inspect.signature(function).parameters:
        raise UserError(
            f"{where}: in {found.__name__} it is no method of the object's (it is {with_article(type(function).__name__)}). "
            f"Wanted is `def {name}(self, ...)`."
        )
    return Signature(function, where, method=name)
