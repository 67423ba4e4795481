"""Who plays the episodes of a recipe: environments within this process, or harnesses at the endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.data.chat import Tokenizer
from megarl.data.images import Sight
from megarl.recipe.schema import Recipe
from megarl.rollout.attempt import Player
from megarl.serving.client import ServerEndpoint

if TYPE_CHECKING:
    from megarl.agents.tool_sources import SharedTools


def open_player(
    recipe: Recipe, router: ServerEndpoint, address: str, tokenizer: Tokenizer, sight: Sight | None = None
) -> Player:
    """Of a recipe that has an agent. address: of this node. sight: of a model that sees images.

    Raises UserError where what it names does not import.
    """
    assert recipe.agent is not None
    if recipe.agent.environments:
        from megarl.agents.by_row import PlayersByRow

        return PlayersByRow.open(recipe, router, address, tokenizer, sight)
    return open_one(recipe, router, address, tokenizer, sight)


def open_one(
    recipe: Recipe,
    router: ServerEndpoint,
    address: str,
    tokenizer: Tokenizer,
    sight: Sight | None = None,
    shared: SharedTools | None = None,
) -> Player:
    """The same where one plays all rows. shared: tools that others have as well."""
    assert recipe.agent is not None
    # Loaded where they play: most recipes have no agent, and a harness needs a web server.
    if recipe.agent.harnessed:
        from megarl.agents.harness import Harnesses

        return Harnesses.open(recipe, router, address, tokenizer, sight)
    from megarl.agents.episode import Episodes

    return Episodes.open(recipe, router, tokenizer, sight, shared)
