"""Who plays the episodes of a recipe: environments within this process, or harnesses at the endpoint."""

from __future__ import annotations

from megarl.data.chat import Tokenizer
from megarl.recipe.schema import Recipe
from megarl.rollout.attempt import Player
from megarl.serving.client import ServerEndpoint


def open_player(recipe: Recipe, router: ServerEndpoint, address: str, tokenizer: Tokenizer) -> Player:
    """Of a recipe that has an agent. address: of this node. Raises UserError where what it names does not import."""
    assert recipe.agent is not None
    # Loaded where they play: most recipes have no agent, and a harness needs a web server.
    if recipe.agent.harnessed:
        from megarl.agents.harness import Harnesses

        return Harnesses.open(recipe, router, address, tokenizer)
    if recipe.agent.environments:
        from megarl.agents.by_row import EpisodesByRow

        return EpisodesByRow.open(recipe, router, tokenizer)
    from megarl.agents.episode import Episodes

    return Episodes.open(recipe, router, tokenizer)
