"""The section that makes a run one of agents: who answers the policy, turn by turn, and how long that may go on.

What environments and tools are is in megarl/agents; their protocol is in docs/agents.md.
"""

from __future__ import annotations

import shlex
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from megarl.recipe.section import PositiveFloat, PositiveInt, Section, plain_url

# Whose reward a sample's is, beside those of graders: its name in metrics, in samples files and in eval.grader.
ENVIRONMENT = "environment"

Path = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
# Those of SGLang 0.5.21.
PARSERS = (
    *(
        "apertus2509",
        "cohere_command4",
        "deepseekv3",
        "deepseekv31",
        "deepseekv32",
        "deepseekv4",
        "deepseekv41",
        "dots",
    ),
    *(
        "gemma4",
        "gigachat3",
        "gigachat35",
        "glm",
        "glm45",
        "glm47",
        "gpt-oss",
        "hermes",
        "hunyuan",
        "inkling",
        "interns1",
    ),
    *("iquest_q1", "k2_horizon", "kimi_k2", "kimi_k3", "lfm2", "ling3", "llama3", "mimo", "minicpm5", "minimax-m2"),
    *(
        "minimax-m3",
        "mistral",
        "muse",
        "nanbeige",
        "poolside_v1",
        "pythonic",
        "qwen",
        "qwen25",
        "qwen3_coder",
        "spark25",
    ),
    *("step3", "step3p5", "trinity"),
)
PYTHON = "python"  # the tool that comes with megarl
CODE = "code"  # the environment that runs programs


def _place(where: str) -> str:
    """A command, or an address without secrets. Raises ValueError."""
    if where.startswith(("http://", "https://")):
        remedy = "Name a command in its place that reads the key from its environment and asks the server"
        return plain_url(where, "http://host:8000/mcp", remedy)
    try:
        words = shlex.split(where)
    except ValueError as error:
        raise ValueError(f"as a command it cannot be read: {error}") from error
    if not words:
        raise ValueError("wanted is a command, or an address that begins with http")
    return where


EnvironmentName = Literal["guess_number", "calculator", "maze", "code"] | Path
Method = Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")]


Command = Annotated[tuple[str, ...], Field(min_length=1)]


class NamedPlayer(Section):
    """One of several environments or harnesses: what a section `agent` says of its only one."""

    environment: EnvironmentName | None = Field(None, description="as agent.environment")
    command: Command | None = Field(None, strict=False, description="a harness in its place, as agent.command")
    function: Path | None = Field(None, description="a harness in its place, as agent.function")
    settings: dict[str, Any] = Field({}, description="keyword arguments of the environment's class")
    environment_tools: tuple[Method, ...] = Field(
        (), strict=False, description="its methods that the policy may call, as agent.environment_tools"
    )

    @property
    def harnessed(self) -> bool:
        """Whether a harness plays, at the endpoint."""
        return self.command is not None or self.function is not None


class Agent(Section):
    """Episodes of several turns in the place of single responses; docs/agents.md."""

    @property
    def harnessed(self) -> bool:
        """Whether a harness plays, at the endpoint; or one of several."""
        named = any(each.harnessed for each in self.environments.values())
        return self.command is not None or self.function is not None or named

    @property
    def has_command(self) -> bool:
        """Whether that is a process for each episode."""
        return self.command is not None or any(each.command is not None for each in self.environments.values())

    @property
    def has_tools(self) -> bool:
        """Whether megarl calls tools for the policy."""
        methods = self.environment_tools or any(each.environment_tools for each in self.environments.values())
        return bool(self.tools or self.mcp or methods)

    @property
    def has_environment(self) -> bool:
        """Whether an environment plays, or one of several."""
        named = any(each.environment is not None for each in self.environments.values())
        return self.environment is not None or named

    def kinds(self) -> dict[str, Agent]:
        """For each of several environments and harnesses, by name, the section as it would be with that one alone."""
        alone: dict[str, Any] = {"environments": {}, "environment_key": None}
        own: dict[str, Any] = {"tools": (), "mcp": ()}  # a harness has tools of its own
        return {
            name: self.model_copy(update={**dict(each), **alone, **(own if each.harnessed else {})})
            for name, each in self.environments.items()
        }

    @property
    def rewards(self) -> bool:
        """Whether what plays may say what an episode is worth."""
        return self.has_environment or self.harnessed

    environment: EnvironmentName | None = Field(
        None,
        description="what answers the policy and rewards it: guess_number, calculator, maze, code, or pkg.module:Class with "
        "the coroutines start, step and close; default: nobody but tools; the "
        "first turn without a call is the answer, and graders reward it",
    )
    environments: dict[str, NamedPlayer] = Field(
        {},
        description="several environments and harnesses in the place of one, by name: {walk: {environment: maze, settings: "
        '{size: 3}}, shop: {environment: "shop:Shop", environment_tools: [price_of]}, web: {command: [python, play.py]}}; a '
        "row's episodes go to the one that it names",
    )
    environment_key: str | None = Field(
        None,
        min_length=1,
        description="with environments: the field of the rows that names one of them, dots into objects, such as data_source",
    )
    command: Command | None = Field(
        None,
        strict=False,
        description="a harness in the place of an environment: a process for each episode, which asks the policy by "
        "OPENAI_BASE_URL and OPENAI_API_KEY, has the row as JSON on its standard input and reports the reward; docs/endpoint.md",
    )
    function: Path | None = Field(
        None,
        description="the same within the collector: the coroutine pkg.module:function(base_url, key, row), which gives the "
        "reward",
    )
    settings: dict[str, Any] = Field({}, description="keyword arguments of the environment's class")
    workers: PositiveInt | None = Field(
        None,
        description="processes of each collector that environments run in, each in a thread of its own, so that their code may "
        "block; default: on the collector's event loop",
    )
    max_turns: PositiveInt = Field(16, description="most responses of the policy in one episode")
    turn_tokens: PositiveInt | None = Field(
        None,
        description="longest response of one turn, in tokens; a turn that is cut off there ends its episode, truncated; default: "
        "what rollout.max_response_tokens leaves",
    )
    timeout_s: PositiveFloat = Field(
        1800.0,
        description="seconds of generation, environment and tools in one episode, looked at between turns; waiting for a turn "
        "at the servers does not count",
    )
    step_timeout_s: PositiveFloat = Field(
        60.0,
        description="deadline of one call of the environment, seconds; then the episode has failed; programs of code have "
        "seconds of their own",
    )
    tools: tuple[Literal["python"] | Path, ...] = Field(
        (),
        strict=False,
        description="what the policy may call: functions as pkg.module:function with type hints, and python, which runs a "
        "program in a sandbox; a turn with calls gets their results, one without goes to the environment",
    )
    mcp: tuple[Annotated[str, AfterValidator(_place)], ...] = Field(
        (),
        strict=False,
        description="MCP servers whose tools the policy may call: commands, such as python tools_server.py, one process in each "
        "collector, or addresses, such as http://host:8000/mcp",
    )
    environment_tools: tuple[Method, ...] = Field(
        (),
        strict=False,
        description="methods of the environment's class, by name, with type hints, that the policy may call: a call goes to the "
        "object of its own episode; the class may have reward() in the place of step, and a turn without a call then ends the "
        "episode",
    )
    tool_parser: Literal[PARSERS] | None = Field(  # type: ignore[valid-type]
        None,
        description="SGLang's parser of the model's tool calls: qwen25 for Qwen2.5 and Qwen3, llama3, deepseekv3, mistral",
    )
    tool_timeout_s: PositiveFloat = Field(
        30.0,
        description="deadline of one call of a tool, seconds; then the policy is told of an error; of python, how long a program "
        "may run once it has a sandbox",
    )
    tool_result_characters: PositiveInt | None = Field(
        None,
        description="longest result of a tool, in characters; a longer one loses its middle, and the policy is told how many "
        "characters are left out; default: whole, of python 8000",
    )
    max_calls: PositiveInt | None = Field(
        None,
        description="most calls of tools in one turn that are run; the policy is told of an error for each further one; default: "
        "all",
    )
    served_as: str = Field(
        "policy",
        min_length=1,
        description="the model's name at the endpoint: what a harness asks for, such as gpt-4o-mini",
    )
    listen: Literal["loopback", "node"] = Field(
        "loopback",
        description="where the endpoint of each collector listens: for harnesses of its own machine, or at its node's address, "
        "for containers and machines beside it",
    )
    processes: PositiveInt = Field(
        32,
        description="most processes of command, and of each command in environments, at once in each collector; other "
        "episodes wait for them",
    )
    credit: Literal["episode", "turn"] = Field(
        "episode",
        description="where the environment's rewards stand for an advantage of tokens: all at the end of the episode, or each at "
        "the end of the turn that earned it, so that later ones do not count for what came after them",
    )
    rewritten: Literal["refuse", "keep", "split"] = Field(
        "refuse",
        description="where the chat template would rewrite earlier turns, such as drop their thinking: refuse the recipe, "
        "keep turns as they were written, or split the episode there: what comes after is another sequence, which begins as "
        "the template has it",
    )
