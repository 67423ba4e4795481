"""The section that makes a run one of agents: who answers the policy, turn by turn, and how long that may go on.

What environments and tools are is in megarl/agents; their protocol is in docs/agents.md.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.recipe.section import PositiveFloat, PositiveInt, Section

# Whose reward a sample's is, beside those of graders: its name in metrics, in samples files and in eval.grader.
ENVIRONMENT = "environment"

Path = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
BUILT_IN_ENVIRONMENTS = ("guess_number", "calculator", "maze")


class Agent(Section):
    """Episodes of several turns in the place of single responses; docs/agents.md."""

    environment: Literal["guess_number", "calculator", "maze"] | Path | None = Field(
        None,
        description="what answers the policy and rewards it: guess_number, calculator, maze, or pkg.module:Class with the "
        "coroutines start, step and close; default: nothing but tools",
    )
    settings: dict[str, Any] = Field({}, description="keyword arguments of the environment's class")
    max_turns: PositiveInt = Field(16, description="most responses of the policy in one episode")
    turn_tokens: PositiveInt | None = Field(
        None, description="longest response of one turn, in tokens; default: what rollout.max_response_tokens leaves"
    )
    timeout_s: PositiveFloat = Field(
        1800.0,
        description="seconds of generation, environment and tools in one episode, looked at between turns; waiting for a turn "
        "at the servers does not count",
    )
    step_timeout_s: PositiveFloat = Field(
        60.0, description="deadline of one call of the environment, seconds; then the episode has failed"
    )
    rewritten: Literal["refuse", "keep"] = Field(
        "refuse",
        description="where the chat template would rewrite earlier turns, such as drop their thinking: refuse the recipe, or "
        "keep turns as they were written",
    )
