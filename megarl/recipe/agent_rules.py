"""What the section `agent` asks of the other keys, as data."""

from __future__ import annotations

from megarl.recipe.agent import ENVIRONMENT, Agent
from megarl.recipe.rule import RL, Contradiction, Unread
from megarl.recipe.schema import Recipe


def score_weights(recipe: Recipe) -> dict[str, float]:
    """Whose scores a sample has, its graders' and its environment's, and what each counts for in the reward."""
    played = recipe.agent is not None and recipe.agent.rewards
    weights = {name: grader.weight for name, grader in recipe.reward.by_name().items()}
    return weights | ({ENVIRONMENT: 1.0} if played else {})


def score_names(recipe: Recipe) -> list[str]:
    """Whose scores a sample has: its graders', and its environment's."""
    return list(score_weights(recipe))


def _players(agent: Agent) -> list[str]:
    """Keys that say who answers the policy."""
    return [f"agent.{key}" for key in ("environment", "environments", "command", "function") if getattr(agent, key)]


def _unclear(agent: Agent) -> list[str]:
    """Of several, who is none, or more than one."""
    return [
        name
        for name, each in agent.environments.items()
        if sum(one is not None for one in (each.environment, each.command, each.function)) != 1
    ]


def _beside_harness(agent: Agent) -> list[str]:
    """Of several, the keys of a harness that are an environment's."""
    return [
        f"agent.environments.{name}.{key}"
        for name, each in agent.environments.items()
        for key in ("settings", "environment_tools")
        if each.harnessed and getattr(each, key)
    ]


def _harnesses_alone(agent: Agent) -> bool:
    return agent.harnessed and not agent.has_environment


AGENT_UNREAD: tuple[Unread, ...] = (
    Unread(
        ("agent.settings",),
        lambda r, _: r.agent is None or r.agent.environment is not None,
        "they are an environment's: set agent.environment; those of agent.environments have their own",
        RL,
    ),
    Unread(
        ("agent.environment_key",),
        lambda r, _: r.agent is None or bool(r.agent.environments),
        "it says which of several environments a row is for: name them in agent.environments",
        RL,
    ),
    Unread(
        ("agent.tool_parser",),
        lambda r, _: r.agent is None or r.agent.has_tools or r.agent.harnessed,
        "there are no tools to call: name some in agent.tools, agent.mcp or agent.environment_tools",
        RL,
    ),
    Unread(
        ("agent.tool_timeout_s", "agent.tool_result_characters", "agent.max_calls"),
        lambda r, _: r.agent is None or r.agent.has_tools,
        "megarl calls no tools: name some in agent.tools, agent.mcp or agent.environment_tools",
        RL,
    ),
    Unread(
        ("agent.served_as", "agent.listen"),
        lambda r, _: r.agent is None or r.agent.harnessed,
        "there is no endpoint without a harness: set agent.command or agent.function, or one of them in agent.environments",
        RL,
    ),
    Unread(
        ("agent.credit",),
        lambda r, asked: r.agent is None or (r.agent.rewards and "token_rewards" in asked.advantage),
        "it is about rewards of an environment or a harness, and an advantage that asks for those of tokens: set "
        "algorithm.advantage to gae, reinforce_pp or grpo_turns, or to a function that asks for token_rewards",
        RL,
    ),
    Unread(
        ("agent.processes",),
        lambda r, _: r.agent is None or r.agent.has_command,
        "they are a harness's: set agent.command, or one in agent.environments",
        RL,
    ),
    Unread(
        ("agent.environment_tools",),
        lambda r, _: r.agent is None or r.agent.environment is not None,
        "they are methods of an environment: set agent.environment; those of agent.environments have their own",
        RL,
    ),
    Unread(
        ("agent.step_timeout_s", "agent.workers"),
        lambda r, _: r.agent is None or r.agent.has_environment,
        "it is an environment's: set agent.environment",
        RL,
    ),
)

AGENT_CONTRADICTIONS: tuple[Contradiction, ...] = (
    Contradiction(
        "agent",
        lambda r, _: r.agent is not None and not r.agent.rewards and not r.agent.has_tools,
        lambda r: (
            "nobody would answer the policy. Set agent.environment, agent.tools, agent.mcp, agent.command or agent.function"
        ),
        RL,
    ),
    Contradiction(
        "agent",
        lambda r, _: r.agent is not None and len(_players(r.agent)) > 1,
        lambda r: f"one of them plays an episode, and {' and '.join(_players(r.agent))} are set. Remove all but one",
        RL,
    ),
    Contradiction(
        "agent.environment_key",
        lambda r, _: r.agent is not None and bool(r.agent.environments) and r.agent.environment_key is None,
        lambda r: (
            f"nothing says which row is for which of {', '.join(r.agent.environments)}. Set it to the field of the rows that "
            "names one of them"
        ),
        RL,
    ),
    Contradiction(
        "agent.environments",
        lambda r, _: r.agent is not None and bool(_unclear(r.agent)),
        lambda r: (
            f"one plays the episodes of {' and of '.join(_unclear(r.agent))}: an environment, a command or a function. Name one "
            "of the three there"
        ),
        RL,
    ),
    Contradiction(
        "agent.environments",
        lambda r, _: r.agent is not None and bool(_beside_harness(r.agent)),
        lambda r: f"a harness has none of what an environment has. Remove {' and '.join(_beside_harness(r.agent))}",
        RL,
    ),
    Contradiction(
        "agent.tools",
        lambda r, _: r.agent is not None and bool(r.agent.tools) and _harnesses_alone(r.agent),
        lambda r: "a harness has tools of its own, and sends them with its requests. Remove the key",
        RL,
    ),
    Contradiction(
        "agent.mcp",
        lambda r, _: r.agent is not None and bool(r.agent.mcp) and _harnesses_alone(r.agent),
        lambda r: "a harness has tools of its own, and sends them with its requests. Remove the key",
        RL,
    ),
    Contradiction(
        "agent.rewritten",
        lambda r, _: r.agent is not None and r.agent.rewritten == "split" and r.agent.harnessed,
        lambda r: (
            "split is for environments and tools: what a harness sends is one conversation, which is not rendered anew. Set "
            "it to keep"
        ),
        RL,
    ),
    Contradiction(
        "agent.turn_tokens",
        lambda r, _: (
            r.agent is not None
            and r.agent.turn_tokens is not None
            and r.agent.turn_tokens > r.rollout.max_response_tokens
        ),
        lambda r: (
            f"a turn of {r.agent.turn_tokens} tokens does not fit into rollout.max_response_tokens "
            f"{r.rollout.max_response_tokens}, which bounds the whole episode. Raise that, or lower this"
        ),
        RL,
    ),
    Contradiction(
        "agent.tool_parser",
        lambda r, _: r.agent is not None and r.agent.has_tools and r.agent.tool_parser is None,
        lambda r: "nobody could read the model's calls. Set it to the parser of the model's family, such as qwen25",
        RL,
    ),
    Contradiction(
        "reward.graders",
        lambda r, _: r.agent is not None and ENVIRONMENT in r.reward.by_name(),
        lambda r: f"`{ENVIRONMENT}` is the name of the environment's own reward. Give the grader another name",
        RL,
    ),
    Contradiction(
        "reward.fn",
        lambda r, _: not score_names(r),
        lambda r: "it is null, and nothing else grades. Name a rule, or give graders in reward.graders",
        RL,
    ),
)
