"""Several environments and harnesses in one run: each row's episodes are played with the one that the row names.

Not for which that is, nor for whether all rows name one (row_kinds.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from megarl.agents.player import open_one
from megarl.agents.row_kinds import kind_of
from megarl.agents.tool_sources import open_shared
from megarl.agents.tools import Holder
from megarl.core.types import Sample
from megarl.data.chat import Tokenizer
from megarl.data.images import Sight
from megarl.recipe.schema import Recipe
from megarl.rollout.asking import Asker
from megarl.rollout.attempt import Attempt, Player
from megarl.serving.client import ServerEndpoint


class PlayersByRow:
    """The Player of recipes with several. players: by their names. held: what tools hold that all have."""

    def __init__(self, players: Mapping[str, Player], key: str, held: Sequence[Holder] = ()) -> None:
        self._players, self._key, self._held = players, key, held

    @classmethod
    def open(
        cls, recipe: Recipe, router: ServerEndpoint, address: str, tokenizer: Tokenizer, sight: Sight | None = None
    ) -> PlayersByRow:
        """Of a recipe that names some. sight: of a model that sees images.

        Raises UserError where an environment, a function or a tool does not import.
        """
        agent = recipe.agent
        assert agent is not None and agent.environment_key is not None
        shared = open_shared(agent)
        players = {
            name: open_one(recipe.model_copy(update={"agent": kind}), router, address, tokenizer, sight, shared)
            for name, kind in agent.kinds().items()
        }
        return cls(players, agent.environment_key, shared.held)

    async def play(self, attempt: Attempt, asker: Asker) -> Sample:
        """As of who plays the row, which names one: else the run was refused."""
        return await self._players[str(kind_of(self._key, attempt.prompt))].play(attempt, asker)

    async def close(self) -> None:
        """As of all of them."""
        try:
            await asyncio.gather(*(player.close() for player in self._players.values()))
        finally:  # what a tool holds may be processes
            await asyncio.gather(*(each.close() for each in self._held))
