"""The environment that a recipe names: found, checked before anything starts, and made anew for each episode.

A class whose environments have something in common, such as a pool or connections, has a static method `share`: it takes the
settings, once in each process, and what it gives is the constructor's one argument. Its coroutine `close` is called in the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

from megarl.agents.environment import Done, Environment, EnvironmentFailedError, EpisodeRow, Message, Response, Turn
from megarl.agents.patience import within
from megarl.core.errors import UserError
from megarl.core.importing import import_attribute, importable
from megarl.core.words import did_you_mean, with_article
from megarl.recipe.agent import Agent

BUILT_IN: Mapping[str, str] = {
    "guess_number": "megarl.agents.environments.guess_number:GuessNumber",
    "calculator": "megarl.agents.environments.calculator:Calculator",
    "maze": "megarl.agents.environments.maze:Maze",
    "code": "megarl.agents.environments.code:CodeWithTests",
}
# Each with what it takes beside itself.
METHODS: Mapping[str, tuple[str, ...]] = {"start": ("row",), "step": ("response",), "close": ()}
STEP, REWARD = "step", "reward"  # where methods are tools, the second may stand in the place of the first
KEY = "agent.environment"

SHARE = "share"
CLOSE_S = 5.0  # for one that was made to be looked at

Make = Callable[[], Environment]


class Shared(Protocol):
    """What all environments of a process have in common. It is made before its event loop runs."""

    async def close(self) -> None:
        """Give back what it holds; no episode is played any more."""


class Maker:
    """Makes an environment for each episode, all of the same settings."""

    def __init__(self, found: type[Any], settings: Mapping[str, Any]) -> None:
        share = getattr(found, SHARE, None)
        self._found = found
        self._shared: Shared | None = None if share is None else share(**settings)
        self._settings = dict(settings)

    def __call__(self) -> Environment:
        """Another one."""
        made: Environment = self._found(**self._settings) if self._shared is None else self._found(self._shared)
        return made

    async def close(self) -> None:
        """Close what they share."""
        if self._shared is not None:
            await self._shared.close()


class AnswerAlone:
    """In the place of an environment where there are tools alone: the first turn without a call ends the episode."""

    async def start(self, row: EpisodeRow) -> list[Message]:
        """The row's own prompt."""
        return list(row.messages)

    async def step(self, response: Response) -> Turn | Done:
        """The end; graders say what it is worth."""
        return Done()

    async def close(self) -> None:
        """Nothing is held."""


def open_environment(agent: Agent) -> Maker:
    """What makes an environment for an episode. Raises UserError, as `check_environment` does, but makes none."""
    if agent.environment is None:
        return Maker(AnswerAlone, {})
    return Maker(environment_class(agent.environment), agent.settings)


def has_step(agent: Agent) -> bool:
    """Whether a turn without a call is answered by `step`; else it ends the episode, and `reward` says what that was worth."""
    return agent.environment is None or not _rewards_alone(environment_class(agent.environment), agent)


def check_environment(agent: Agent) -> None:
    """Whether there is such an environment, with its methods, and whether it takes the recipe's settings.

    One is made, so that its constructor may say what is wrong with them, and closed. Raises UserError.
    """
    assert agent.environment is not None
    found = environment_class(agent.environment)
    _check_methods(found, agent)
    _check_settings(found, agent)
    try:
        with importable(Path.cwd()):  # as in a collector: a constructor may import, too
            asyncio.run(_tried(Maker(found, agent.settings)))
    except Exception as error:  # whatever a user's constructor raises
        raise UserError(
            f"agent.settings: {agent.environment} does not take them: {type(error).__name__}: {error}. Mend agent.settings."
        ) from error


async def _tried(maker: Maker) -> None:
    """Make one on an event loop, where episodes make them, and give back what it holds. Episodes tell of a close that fails."""
    made = maker()
    for close in (made.close, maker.close):
        with contextlib.suppress(EnvironmentFailedError):
            await within(close, CLOSE_S, "close")


def environment_class(name: str) -> type[Any]:
    """The class that a recipe names. Raises UserError."""
    found = import_attribute(BUILT_IN.get(name, name), KEY)
    if not inspect.isclass(found):
        raise UserError(
            f"{KEY}={name!r}: it is {with_article(type(found).__name__)}; wanted is a class with the "
            f"coroutines {', '.join(METHODS)}."
        )
    return found


def _rewards_alone(found: type[Any], agent: Agent) -> bool:
    return bool(agent.environment_tools) and not hasattr(found, STEP) and hasattr(found, REWARD)


def _check_methods(found: type[Any], agent: Agent) -> None:
    where, methods = f"{KEY}={agent.environment!r}", dict(METHODS)
    if _rewards_alone(found, agent):
        del methods[STEP]
        methods[REWARD] = ()
    for method, takes in methods.items():
        function = getattr(found, method, None)
        wanted = f"{'' if method == REWARD else 'async '}def {method}({', '.join(('self', *takes))})"
        if not callable(function):
            near = get_close_matches(method, [each for each in dir(found) if not each.startswith("_")], n=1)
            hint = f" Did you mean that by {near[0]!r}?" if near else ""
            if method == STEP and agent.environment_tools:
                hint += f" Or `def {REWARD}(self)`, where a turn without a call is to end the episode."
            raise UserError(f"{where}: {found.__name__} has no method {method!r}; wanted is `{wanted}`.{hint}")
        if method != REWARD and not inspect.iscoroutinefunction(function):
            raise UserError(
                f"{where}: {found.__name__}.{method} is no coroutine; wanted is `{wanted}`. All episodes share one event loop: "
                "what blocks belongs into `await asyncio.to_thread(...)`, or into processes: agent.workers."
            )
        try:
            inspect.signature(function).bind(None, *takes)
        except TypeError as error:
            raise UserError(
                f"{where}: {found.__name__}.{method}{inspect.signature(function)} cannot be called as `{wanted}`: {error}."
            ) from error


def _check_settings(found: type[Any], agent: Agent) -> None:
    shares = hasattr(found, SHARE)
    if shares and agent.workers is not None:
        raise UserError(
            f"agent.workers: environments of {agent.environment} share what belongs to one event loop, and in workers each has "
            "its own. Remove agent.workers."
        )
    signature = inspect.signature(getattr(found, SHARE, found))
    takes = [
        each.name for each in signature.parameters.values() if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]
    anything = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    where, names = f"of {agent.environment}", ", ".join(takes) or "none"
    for key in agent.settings:
        if key not in takes and not anything:
            hint = did_you_mean(key, takes)
            raise UserError(f"agent.settings.{key}: there is no such setting {where}.{hint} Its settings: {names}.")
    try:
        signature.bind(**agent.settings)
    except TypeError as error:
        raise UserError(f"agent.settings {where}: {error}. Its settings: {names}.") from error
