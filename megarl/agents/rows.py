"""The row that an episode is about, as environments and harnesses are told of it."""

from __future__ import annotations

from megarl.agents.environment import EpisodeRow
from megarl.data.prompts import MESSAGES_KEY
from megarl.rollout.attempt import Attempt


def episode_row(attempt: Attempt) -> EpisodeRow:
    """Copies: all episodes of a row share it, and what plays them is others' code."""
    row = attempt.prompt
    fields = {name: value for name, value in row.metadata.items() if name != MESSAGES_KEY}
    messages = row.metadata.get(MESSAGES_KEY, ({"role": "user", "content": row.text},))
    return EpisodeRow(row.id, tuple(map(dict, messages)), row.answer, fields, attempt.environment_seed)
