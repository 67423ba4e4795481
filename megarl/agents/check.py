"""What can be refused of a recipe's agent before anything starts: its environment, its settings, the model's chat template."""

from __future__ import annotations

from megarl.agents.loading import check_environment
from megarl.agents.template import ChatTemplate
from megarl.core.errors import TemplateRefusalError, UserError
from megarl.data.chat import Tokenizer, has_chat_template
from megarl.recipe.schema import Recipe


def check_agent(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Raises UserError for the first thing that cannot work; nothing to check where the recipe has no agent."""
    agent = recipe.agent
    if agent is None:
        return
    if agent.environment is not None:
        check_environment(agent)
    where = f"model.path {recipe.model.path}"
    if not has_chat_template(tokenizer):
        raise UserError(
            f"{where}: its tokenizer has no chat template, and an agent's turns are chat messages. Add chat_template to "
            "tokenizer_config.json, or take a model that has one."
        )
    try:
        template = ChatTemplate(tokenizer)
        rewritten = template.rewritten() if agent.max_turns > 1 else ""
    except TemplateRefusalError as error:
        raise UserError(f"{where}: {error} An agent's turns are the user's and the assistant's by turns.") from error
    if rewritten and agent.rewritten == "refuse":
        raise UserError(
            f"agent.rewritten: the chat template of {where} renders earlier turns otherwise than they were written: {rewritten}. "
            "Turns are trained on as they were written, and stay so in the context: set agent.rewritten to keep where the model "
            "may see its earlier turns so, or take a template that keeps them."
        )
