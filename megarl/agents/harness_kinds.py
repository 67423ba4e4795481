"""The harness that a recipe names: a command or a function; found, and checked before anything starts."""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from megarl.agents.environment import Done, EnvironmentFailedError, EpisodeRow, check_done
from megarl.agents.harness_process import run_command, variables_of, without_proxy
from megarl.agents.patience import NEVER_S, within
from megarl.core.errors import UserError
from megarl.core.importing import import_attribute
from megarl.recipe.agent import Agent

FUNCTION = "agent.function"
TAKES = ("base_url", "key", "row")


class Harness(Protocol):
    """Plays an episode at the endpoint. Raises EnvironmentFailedError."""

    async def play(self, url: str, key: str, row: EpisodeRow) -> Done | None:
        """The end, where it says so here and not at the endpoint. Where it is cancelled, it leaves nothing."""


class CommandHarness:
    """A process for each episode."""

    def __init__(self, command: tuple[str, ...], model: str) -> None:
        self._command, self._model = command, model

    async def play(self, url: str, key: str, row: EpisodeRow) -> None:
        """Until it ends. It reports its reward at the endpoint."""
        await run_command(self._command, row, variables_of(url, key, self._model))


class FunctionHarness:
    """A coroutine in this process."""

    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self._function = function
        self._url = ""  # that no proxy is asked for

    async def play(self, url: str, key: str, row: EpisodeRow) -> Done | None:
        """What it gives: a number is the reward."""
        if url != self._url:
            os.environ.update(without_proxy(url))
            self._url = url

        async def played() -> Done | None:
            found = await self._function(url, key, row)
            if found is None or isinstance(found, Done):
                return found if found is None else check_done(found, "the harness")
            if not hasattr(found, "__float__"):
                raise EnvironmentFailedError(
                    f"the harness gave a {type(found).__name__}; wanted is its reward, a number, or Done, or nothing where it "
                    "was reported at the endpoint"
                )
            return check_done(Done(found), "the harness")

        return await within(played, NEVER_S, "the harness")


def open_harness(agent: Agent) -> Harness:
    """Of a recipe that names one. Raises UserError where a function does not import."""
    if agent.command is not None:
        return CommandHarness(agent.command, agent.served_as)
    assert agent.function is not None
    return FunctionHarness(import_attribute(agent.function, FUNCTION))


def check_harness(agent: Agent) -> None:
    """Whether there is such a program or coroutine; it is not called. Raises UserError."""
    if agent.command is not None:
        program = agent.command[0]
        if shutil.which(program) is None:
            raise UserError(
                f"agent.command: there is no program {program!r} to run. Name one of PATH, or a path from the folder that megarl "
                "is called in, such as ./play.sh."
            )
        return
    assert agent.function is not None
    where = f"{FUNCTION}={agent.function!r}"
    function = import_attribute(agent.function, FUNCTION)
    wanted = f"async def {getattr(function, '__name__', 'play')}({', '.join(TAKES)})"
    if not inspect.iscoroutinefunction(function):
        raise UserError(
            f"{where}: it is no coroutine; wanted is `{wanted}`. All episodes share one event loop: what blocks belongs into "
            "`await asyncio.to_thread(...)`, or into a process of its own, agent.command."
        )
    try:
        inspect.signature(function).bind(*TAKES)
    except TypeError as error:
        raise UserError(f"{where}: it cannot be called as `{wanted}`: {error}.") from error
