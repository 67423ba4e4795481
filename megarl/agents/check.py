"""What can be refused of a recipe's agent before anything starts: its environment and tools, and the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.agents.environment import Message
from megarl.agents.harness_kinds import check_harness
from megarl.agents.loading import check_environment
from megarl.agents.python_sandbox import check_sandboxes
from megarl.agents.template import ASKED, STAND_IN, ChatTemplate, assistant
from megarl.agents.tool_sources import SharedTools, open_shared, open_toolbox
from megarl.agents.tools import ToolCall
from megarl.core.errors import TemplateRefusalError, UserError
from megarl.data.chat import Tokenizer, has_chat_template
from megarl.recipe.agent import CODE, PYTHON, Agent
from megarl.recipe.schema import Recipe

RESULT: Message = {"role": "tool", "content": "what-the-tool-gave"}


def check_agent(recipe: Recipe, tokenizer: Tokenizer) -> int:
    """How many tokens of each prompt tell of tools; of several players the most. Raises UserError for what cannot work.

    There is nothing to check where the recipe has no agent.
    """
    agent = recipe.agent
    if agent is None:
        return 0
    if not agent.environments:
        return _check_one(recipe, agent, tokenizer, None)
    shared, told = open_shared(agent), 0
    for name, kind in agent.kinds().items():
        try:
            told = max(told, _check_one(recipe, kind, tokenizer, shared))
        except UserError as error:
            raise UserError(f"In agent.environments.{name}: {error}") from error
    return told


def _check_one(recipe: Recipe, agent: Agent, tokenizer: Tokenizer, shared: SharedTools | None) -> int:
    """Of an agent with one environment or harness at most. Returns and raises as `check_agent`."""
    told = 0
    if agent.environment is not None:
        check_environment(agent)
    if agent.harnessed:
        check_harness(agent)
    schemas = open_toolbox(agent, shared).schemas if agent.has_tools else []
    if PYTHON in agent.tools:
        check_sandboxes(agent.tool_timeout_s, "agent.tools: python")
    if agent.environment == CODE:
        check_sandboxes(agent.step_timeout_s, "agent.environment: code")
    where = f"model.path {recipe.model.path}"
    if not has_chat_template(tokenizer):
        raise UserError(
            f"{where}: its tokenizer has no chat template, and an agent's turns are chat messages. Add chat_template to "
            "tokenizer_config.json, or take a model that has one."
        )
    try:
        template = ChatTemplate(tokenizer, schemas)
        if schemas:
            told = _check_tools(
                template, [each["function"]["name"] for each in schemas], where, recipe.data.max_prompt_tokens
            )
            told -= len(ChatTemplate(tokenizer).prompt([ASKED])[0])
            if agent.rewritten == "split":
                _check_results(template, where)
        if agent.rewritten == "split":
            _check_turns(template, where)
        rewritten = template.rewritten() if agent.max_turns > 1 else ""
    except TemplateRefusalError as error:
        raise UserError(f"{where}: {error} An agent's turns are the user's and the assistant's by turns.") from error
    if not rewritten and agent.rewritten != "refuse":
        raise UserError(
            f"agent.rewritten: {agent.rewritten} is for chat templates that rewrite earlier turns, and that of {where} rewrites "
            "none. Remove the key."
        )
    if rewritten and agent.rewritten == "refuse":
        raise UserError(
            f"agent.rewritten: the chat template of {where} renders earlier turns otherwise than they were written: {rewritten}. "
            "Turns are trained on as they were written, and stay so in the context: set agent.rewritten to keep where the model "
            "may see its earlier turns so, to split where it has to see them as the template has them, or take a template that "
            "keeps them."
        )
    return told


def _check_tools(template: ChatTemplate, names: Sequence[str], where: str, most: int) -> int:
    """That the model is told of its tools, and of their results: tokens of a short prompt with them. Raises UserError."""
    ids, _ = template.prompt([ASKED])
    remedy = "Take a model whose template knows tools, or remove agent.tools, agent.mcp and agent.environment_tools."
    if template.untold(names):
        raise UserError(f"agent.tools: the chat template of {where} tells the model nothing of its tools. {remedy}")
    if len(ids) > most:
        raise UserError(
            f"agent.tools, agent.mcp, agent.environment_tools: what the model is told of them takes {len(ids)} tokens of each "
            f"prompt, and data.max_prompt_tokens is {most}. Raise that, or shorten the tools' docstrings."
        )
    call = ToolCall(names[0], "{}", "c00000000")
    told = {**RESULT, "name": call.name, "tool_call_id": call.id}
    try:
        shown = template.between([told], [call])
    except TemplateRefusalError as error:
        raise UserError(f"agent.tools: {where}: {error} {remedy}") from error
    if told["content"] not in shown:
        raise UserError(f"agent.tools: the chat template of {where} leaves out what a tool gave. {remedy}")
    return len(ids)


def _check_turns(template: ChatTemplate, where: str) -> None:
    """That an earlier turn is rendered as the model wrote it, marks and all: gpt-oss' template refuses them. Raises UserError."""
    try:
        template.prompt([ASKED, assistant(template.as_written(STAND_IN)), ASKED])
    except TemplateRefusalError as error:
        raise UserError(
            f"agent.rewritten: split has the chat template of {where} render earlier turns as the model wrote them. {error} "
            "Set it to keep."
        ) from error


def _check_results(template: ChatTemplate, where: str) -> None:
    """That results of tools are rendered behind a call as the model wrote it. Raises UserError."""
    try:
        template.prompt([ASKED, assistant("what-the-policy-called"), RESULT])
    except TemplateRefusalError as error:
        raise UserError(
            f"agent.rewritten: split has the chat template of {where} render calls as the model wrote them, and results behind "
            f"them. {error} Set it to keep, or remove agent.tools."
        ) from error
