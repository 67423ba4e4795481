"""The row that an episode is about, as environments and harnesses are told of it."""

from __future__ import annotations

from copy import deepcopy

from megarl.agents.environment import EpisodeRow
from megarl.data.prompts import MESSAGES_KEY
from megarl.rollout.attempt import Attempt


def episode_row(attempt: Attempt) -> EpisodeRow:
    """Copies, of what is in them too: all episodes of a row share it, and what plays them is others' code."""
    row = attempt.prompt
    fields = deepcopy(row.metadata)
    messages = fields.pop(MESSAGES_KEY, ({"role": "user", "content": row.text},))
    images = tuple(image.source for image in row.images)
    return EpisodeRow(row.id, tuple(messages), row.answer, fields, attempt.environment_seed, images)
